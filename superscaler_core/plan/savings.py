"""Savings: the decisions of a plan that reduce the memory that devices need in a step."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.part import Part
from superscaler_core.plan.members import members


class Groups:
    """Groups of ops or parts; each group has a positive number that is unique in the plan."""

    def __init__(self, numbers: count[int]) -> None:
        self._numbers = numbers
        self._number: dict[Op | Part, int] = {}

    def add(self, group: Iterable[Op | Part]) -> None:
        """Add a group; its members leave the groups that they were in."""
        self._number |= dict.fromkeys(group, next(self._numbers))

    def __copy__(self) -> Groups:
        made = Groups(self._numbers)
        made._number = dict(self._number)
        return made

    @property
    def key(self) -> Hashable:
        """The number of every member, as a value."""
        return frozenset(self._number.items())

    def __bool__(self) -> bool:
        """Whether any group has members."""
        return bool(self._number)

    def number(self, what: Op | Part) -> int:
        """The number of the group of an op or part, 0 if none; a part is in its op's group."""
        if not self._number:
            return 0
        own = self._number.get(what)
        return own or (self._number.get(what.op, 0) if isinstance(what, Part) else 0)


@dataclass(frozen=True, slots=True)
class FsdpUnit:
    """Ops whose weights are unsharded for them, or whose gradients are reduced right after them.

    Attributes:
        ops: the ops.
        unshards: whether weights are gathered, not only gradients reduced.
    """

    ops: tuple[Op, ...]
    unshards: bool


class Savings:
    """Decisions about memory: recomputing, offloading, storage on the host, FSDP units.

    Args:
        graph: the graph that the decisions are about.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        numbers = count(1)
        self._recomputed = Groups(numbers)
        self._regions = Groups(numbers)
        self._offloaded = Groups(numbers)
        self._on_host: set[str] = set()
        self._units: list[FsdpUnit] = []

    def recompute(self, *groups: Iterable[Op | Part]) -> None:
        """Keep only the inputs of each group, and recompute the group in the backward.

        Communication inside a group splits it: the ops between communications are recomputed, and
        nothing is sent twice.
        """
        for group in groups:
            self._recomputed.add(members(self.graph, "recompute", group))

    def recompute_group(self, part: Part) -> int:
        """The number of the group with which a part is recomputed; 0 if it is not."""
        return self._recomputed.number(part)

    def recompute_regions(self, *groups: Iterable[Op]) -> None:
        """Keep only the inputs of each group, and recompute it as a whole before its backward.

        The recomputation includes communication inside the group, except for edges that only leave
        it. If communication, or ``op_order`` of parts on one device, splits a group into many
        segments, ``recompute`` keeps the inputs of each segment, while this keeps only those of the
        first. Parts can also be recomputed in the backward of the recomputation; the recomputation
        leaves them out where nothing else in the group reads their results. A group that cuts a
        FSDP unit of ``unshard`` is extended to the whole FSDP unit.
        """
        for group in groups:
            self._regions.add(members(self.graph, "recompute_regions", group))

    def region_group(self, op: Op) -> int:
        """The number of the group with which an op is recomputed; 0 if it is not."""
        return self._regions.number(op)

    def offload(self, *groups: Iterable[Op | Part]) -> None:
        """Move what each group keeps for its backward to host memory in the meantime.

        It is copied back during the backward of the ops after the group. If the group is recomputed
        as well, its inputs are moved. Weights, constants, inputs of the model and other values
        without gradient stay on the device, because many groups share them.

        Raises:
            PlanError: a group has no ops.
        """
        for group in groups:
            ops = members(self.graph, "offload", group)
            if not ops:
                raise PlanError("offload of a group without ops: give groups of ops, or none.")
            self._offloaded.add(ops)

    def offload_group(self, part: Part) -> int:
        """The number of the group with which a part's kept values are offloaded; 0 if none."""
        return self._offloaded.number(part)

    @property
    def has_groups(self) -> bool:
        """Whether any group is recomputed or offloaded."""
        return bool(self._recomputed or self._offloaded)

    @property
    def runs_again(self) -> bool:
        """Whether any group is recomputed as a whole."""
        return bool(self._regions)

    @property
    def offloads(self) -> bool:
        """Whether any group is offloaded to host memory."""
        return bool(self._offloaded)

    def store_on_host(self, *patterns: str) -> None:
        """Store parameters in host memory and run their optimizer there: ZeRO-Offload.

        The host holds the master weights, their reduced gradients, and the optimizer's states. Ops
        read copies on the device, as for any storage that differs from what they read.

        Args:
            patterns: names of parameters, with wildcards; all parameters if none is given.

        Raises:
            PlanError: a pattern matches no parameter.
        """
        for pattern in patterns or ("*",):
            names = (*self.graph.parameters, *self.graph.aliases)
            found = {self.graph.parameter(n).name for n in names if fnmatchcase(n, pattern)}
            if not found:
                raise PlanError(
                    f"store_on_host: {self.graph.name} has no parameter that fits {pattern!r}; it "
                    f"has {', '.join(list(self.graph.parameters)[:8])}, ..."
                )
            self._on_host |= found

    @property
    def on_host(self) -> frozenset[str]:
        """Names of the parameters that are stored in host memory."""
        return frozenset(self._on_host)

    def unshard(self, *groups: Iterable[Op]) -> None:
        """Unshard the weights that a group of ops reads before the group, and reshard them after
        it.

        This happens in the forward and again in the backward, where the gradients are also reduced:
        ZeRO-3.
        """
        self._units += [self._unit("unshard", group) for group in groups]

    def reduce_grads(self, *groups: Iterable[Op]) -> None:
        """Reduce the gradients of a group's weights as soon as its backward is done: ZeRO-2."""
        self._units += [self._unit("reduce_grads", group) for group in groups]

    def _unit(self, asked: str, group: Iterable[Op]) -> FsdpUnit:
        found = members(self.graph, asked, group)
        return FsdpUnit(tuple(what.op if isinstance(what, Part) else what for what in found),
                      unshards=asked == "unshard")  # fmt: skip

    @property
    def fsdp_units(self) -> tuple[FsdpUnit, ...]:
        """All FSDP units: the groups of ``unshard`` and of ``reduce_grads``."""
        return tuple(self._units)
