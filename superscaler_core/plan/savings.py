"""Savings: what a plan decides so that a step needs less memory of its devices."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import count

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.part import Part


class Groups:
    """Ops or parts in groups, each with a number above 0 that no other group of the plan has."""

    def __init__(self, numbers: count[int]) -> None:
        self._numbers = numbers
        self._number: dict[Op | Part, int] = {}

    def add(self, group: Iterable[Op | Part]) -> None:
        """One group more; what is in another one too leaves that."""
        self._number |= dict.fromkeys(group, next(self._numbers))

    def __copy__(self) -> Groups:
        made = Groups(self._numbers)
        made._number = dict(self._number)
        return made

    def __bool__(self) -> bool:
        """Whether anything is in a group."""
        return bool(self._number)

    def number(self, what: Op | Part) -> int:
        """The number of the group of something, 0 if it has none; a part is where its op is."""
        if not self._number:
            return 0
        own = self._number.get(what)
        return own or (self._number.get(what.op, 0) if isinstance(what, Part) else 0)


@dataclass(frozen=True, slots=True)
class Window:
    """Ops whose weights are gathered for them, or whose gradients are reduced right after them."""

    ops: tuple[Op, ...]
    gathers: bool


class Savings:
    """Decisions about memory: what is computed or run again, waits on the host, comes and goes.

    Args:
        graph: that the decisions are about.
    """

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        numbers = count(1)
        self._recomputed = Groups(numbers)
        self._rerun = Groups(numbers)
        self._swapped = Groups(numbers)
        self._on_host: set[str] = set()
        self._windows: list[Window] = []

    def recompute(self, *groups: Iterable[Op | Part]) -> None:
        """Keep of each group only what it reads, and compute it again in the backward.

        Ops that communication separates are recomputed between it; nothing is sent twice.
        """
        for group in groups:
            self._recomputed.add(group)

    def recompute_group(self, part: Part) -> int:
        """The number of the group with which a part is recomputed; 0 if it is not."""
        return self._recomputed.number(part)

    def rerun(self, *groups: Iterable[Op]) -> None:
        """Keep of each group only what it reads, and run it again as a whole before its backward.

        Its communication too, but for what only leaves it. So of a group that communication, or
        ``op_order`` of parts on one device, separates into many, ``recompute`` keeps what each of
        those reads, and this only what the first does. Parts may be recomputed besides, in the
        backward of the second run, which leaves them out where nothing in the group reads what they
        make. A group that cuts a window of ``gather_weights`` is run again with all of the window.
        """
        for group in groups:
            self._rerun.add(group)

    def rerun_group(self, op: Op) -> int:
        """The number of the group with which an op is run again; 0 if it is not."""
        return self._rerun.number(op)

    def swap(self, *groups: Iterable[Op | Part]) -> None:
        """Let what each group keeps from its forward to its backward wait in host memory.

        It comes back while the backward of the ops after the group runs. Of a group that is
        recomputed too, what it reads waits there. Weights, constants, inputs of the model and
        other values without gradient, which many groups share, stay on the device.

        Raises:
            PlanError: a group has no ops.
        """
        for group in groups:
            ops = tuple(group)
            if not ops:
                raise PlanError("swap of a group without ops: give groups of ops, or none.")
            self._swapped.add(ops)

    def swap_group(self, part: Part) -> int:
        """The number of the group with which what a part keeps is swapped; 0 if it is not."""
        return self._swapped.number(part)

    @property
    def has_groups(self) -> bool:
        """Whether groups are recomputed or swapped."""
        return bool(self._recomputed or self._swapped)

    @property
    def runs_again(self) -> bool:
        """Whether groups are run again as a whole."""
        return bool(self._rerun)

    @property
    def swaps(self) -> bool:
        """Whether what some group keeps waits in host memory."""
        return bool(self._swapped)

    @property
    def runs_in_order(self) -> bool:
        """Whether every op runs by itself, where the graph has it.

        None is run again or swapped with others, and weights do not come and go.
        """
        return not (self._rerun or self._swapped or self._windows)

    def store_on_host(self, *patterns: str) -> None:
        """Let devices store parameters in host memory, where their optimizer runs: ZeRO-Offload.

        What is stored is the master weights, their gradients once reduced, and the optimizer's
        states; ops read copies on the device, as they do where storage has another form.

        Args:
            patterns: names of parameters, with wildcards; all if none is given.

        Raises:
            PlanError: a pattern fits no parameter.
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

    def gather_weights(self, *groups: Iterable[Op]) -> None:
        """Let the weights that a group of ops reads be gathered before it and dropped after it.

        In the forward and again in the backward, where their gradients are reduced: ZeRO 3.
        """
        self._windows += [Window(tuple(group), gathers=True) for group in groups]

    def reduce_grads(self, *groups: Iterable[Op]) -> None:
        """Let gradients of a group's weights be reduced as soon as its backward is done: ZeRO 2."""
        self._windows += [Window(tuple(group), gathers=False) for group in groups]

    @property
    def windows(self) -> tuple[Window, ...]:
        """All groups whose weights come and go."""
        return tuple(self._windows)
