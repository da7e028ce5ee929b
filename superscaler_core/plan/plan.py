"""Plan: what an sProgram decides about a graph, by op_trans, op_assign and op_order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from itertools import chain, pairwise, product
from math import prod

from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass, Dims
from superscaler_core.graph.graph import Graph, Op
from superscaler_core.graph.part import Part, Piece
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan.decisions import Chosen, Decisions, PlacedPart
from superscaler_core.plan.op_trans import Transformation, pieces, replicate, split
from superscaler_core.plan.savings import Savings
from superscaler_core.schedules import Schedule

Device = int
"""A device is named by the rank of the process that drives it."""


@dataclass(frozen=True, slots=True)
class Axis:
    """One axis of a grid of devices, and what is cut along it.

    Attributes:
        num: devices along it.
        dims: classes of dims; of an op the first that it has is cut, and one that has none of them
            is replicated.
    """

    num: int
    dims: tuple[DimClass, ...] = ()


@dataclass(frozen=True, slots=True)
class Stage:
    """Ops that run together, forward and backward, for one microbatch at a time."""

    index: int
    ops: tuple[Op, ...]


class Plan(Savings):
    """The decisions of an sProgram about ``graph`` on ``devices``.

    At first every op is one part without a device, all ops are one stage, and one microbatch is run
    a step.
    """

    def __init__(self, graph: Graph, devices: Sequence[Device]) -> None:
        if len(set(devices)) != len(devices) or not devices:
            raise PlanError(f"devices {list(devices)}: they have to be distinct, and at least one.")
        super().__init__(graph)
        self.devices = tuple(devices)
        self.dims = Dims(graph)
        self.notes: list[str] = list(graph.notes)
        """Where the plan computes something else than the model; empty if it does not."""
        self.schedule: Schedule | None = None
        self._parts: dict[int, tuple[Part, ...]] = {}
        self._devices: dict[Part, Device] = {}
        self._orders: list[tuple[Op | Part, Op | Part]] = []
        self._cuts: tuple[int, ...] = ()

    # --- op_trans -------------------------------------------------------------------------------

    def op_trans(self, what: Op | Part, how: Transformation) -> tuple[Part, ...]:
        """Let parts do the work of an op, or of one of its parts; returns the new parts.

        Of an op that has parts already every part is transformed.

        Raises:
            PlanError: the op cannot be cut that way, or the part is no longer one of the plan.
        """
        op = what if isinstance(what, Op) else what.op
        now = self.parts(op)
        if isinstance(what, Part) and what not in now:
            raise PlanError(f"op_trans of {what}: it was transformed before; use its parts.")
        made = {part: how(part) for part in (now if isinstance(what, Op) else (what,))}
        for part in made:
            self._devices.pop(part, None)
        self._parts[op.index] = tuple(new for part in now for new in made.get(part, (part,)))
        return tuple(new for parts in made.values() for new in parts)

    def parts(self, op: Op) -> tuple[Part, ...]:
        """The parts of an op now."""
        return self._parts.get(op.index) or (Part(op),)

    # --- op_assign ------------------------------------------------------------------------------

    def op_assign(
        self, what: Op | Part | Iterable[Part], device: Device | Sequence[Device]
    ) -> None:
        """Put parts on devices: all on one, or one after another on a sequence of as many.

        Raises:
            PlanError: the numbers differ, or a device is none of the plan's.
        """
        parts = (
            self.parts(what)
            if isinstance(what, Op)
            else (what,)
            if isinstance(what, Part)
            else tuple(what)
        )
        devices = (device,) * len(parts) if isinstance(device, int) else tuple(device)
        if len(devices) != len(parts):
            raise PlanError(
                f"op_assign of {len(parts)} parts of {parts[0].op.name} to {len(devices)} devices: "
                "give one device, or as many as parts."
            )
        for part, chosen in zip(parts, devices, strict=True):
            if chosen not in self.devices:
                raise PlanError(
                    f"op_assign of {part} to device {chosen}: the plan has {list(self.devices)}."
                )
            self._devices[part] = chosen

    def device(self, part: Part) -> Device | None:
        """Where a part runs; None while nothing was said."""
        return self._devices.get(part)

    # --- op_order -------------------------------------------------------------------------------

    def op_order(self, first: Op | Part | Schedule, then: Op | Part | None = None) -> None:
        """Say what runs before what: one op or part before another, or stages by a schedule.

        Between parts on one device the order is kept as it is given. Parts on different devices
        wait for data alone, so there it only has to be possible.

        Raises:
            PlanError: the schedule is not of this plan's stages.
        """
        if isinstance(first, Schedule):
            if first.num_stages != self.num_stages:
                raise PlanError(
                    f"op_order by {first.name} of {first.num_stages} stages: the plan has "
                    f"{self.num_stages}; cut it by pipeline(...) before."
                )
            if first.num_turns and not self.graph.recycled:
                raise PlanError(
                    f"op_order by {first.name}: it has forwards without gradient ('f'), and "
                    f"{self.graph.name} recycles nothing that they would make; capture it with "
                    "recycled={input: number of the output}."
                )
            self.schedule = first
            return
        if then is None:
            raise PlanError(f"op_order of {first}: say before what it runs.")
        self._orders.append((first, then))

    @property
    def orders(self) -> tuple[tuple[Part, Part], ...]:
        """All pairs of parts that ``op_order`` was given, of ops as they are cut now.

        Raises:
            PlanError: a part was transformed since.
        """
        pairs = (product(self._parts_of(a), self._parts_of(b)) for a, b in self._orders)
        return tuple(chain.from_iterable(pairs))

    def _parts_of(self, what: Op | Part) -> tuple[Part, ...]:
        if isinstance(what, Op):
            return self.parts(what)
        if what not in self.parts(what.op):
            raise PlanError(f"op_order of {what}: it was transformed since; order its parts.")
        return (what,)

    # --- stages ---------------------------------------------------------------------------------

    def pipeline(self, cuts: Sequence[Op | int]) -> tuple[Stage, ...]:
        """Cut the ops into stages, a new one at every op that is given; returns the stages.

        Raises:
            PlanError: the ops do not ascend, or a stage would be empty.
        """
        points = [cut.index if isinstance(cut, Op) else cut for cut in cuts]
        ends = [0, *points, len(self.graph.ops)]
        if any(a >= b for a, b in pairwise(ends)):
            raise PlanError(
                f"stages of {self.graph.name} cut at ops {points}: cut points have to ascend "
                f"from 1 to {len(self.graph.ops) - 1}."
            )
        self._cuts = tuple(points)
        self.__dict__.pop("stages", None)
        return self.stages

    @cached_property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in order; one if the plan has no pipeline."""
        ends = (0, *self._cuts, len(self.graph.ops))
        return tuple(Stage(i, self.graph.ops[ends[i] : ends[i + 1]]) for i in range(len(ends) - 1))

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self._cuts) + 1

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a step."""
        return 1 if self.schedule is None else self.schedule.num_microbatches

    @property
    def num_turns(self) -> int:
        """Forwards without gradient of a step, of all microbatches together."""
        return 0 if self.schedule is None else self.schedule.num_turns

    # --- grids ----------------------------------------------------------------------------------

    def spread(self, op: Op, devices: Sequence[Device], axes: Sequence[Axis]) -> tuple[Part, ...]:
        """Cut or replicate an op along every axis of a grid of devices, and assign the parts.

        Args:
            op: one op.
            devices: of the grid, the last axis innermost.
            axes: what is cut along each.
        """
        if prod(axis.num for axis in axes) != len(devices):
            raise PlanError(
                f"a grid of {' x '.join(str(a.num) for a in axes)} needs "
                f"{prod(a.num for a in axes)} devices, but {len(devices)} were given."
            )
        for axis in axes:
            self.op_trans(op, self._how(op, axis))
        self.op_assign(op, devices)
        return self.parts(op)

    def _how(self, op: Op, axis: Axis) -> Transformation:
        for dim in axis.dims:
            ids = self.dims.ids(op, dim)
            if ids and axis.num > 1:
                return split(ids[0], axis.num)
        return replicate(axis.num)

    # --- weights --------------------------------------------------------------------------------

    def update(self, name: str) -> Op:
        """The op that applies the optimizer to a parameter: its parts say who stores what."""
        return self.graph.updates[self.graph.parameter(name).name]

    def updates(self) -> Mapping[PTensor, tuple[Part, ...]]:
        """Parts of the optimizer's ops that the plan speaks of; others follow the weights' use."""
        return {
            op.outputs[0]: self.parts(op)
            for op in self.graph.updates.values()
            if op.index in self._parts
        }

    def note(self, text: str) -> None:
        """Say what the plan computes differently from the model."""
        self.notes.append(text)

    # --- decisions ------------------------------------------------------------------------------

    @property
    def decisions(self) -> Decisions:
        """All that the plan says now, as a value.

        Groups are in the order of the first op of each, whenever they were made.
        """
        ops = (*self.graph.ops, *self.graph.updates.values())
        placed = {op.name: self._placed(op) for op in ops}
        return Decisions(
            self.graph.name,
            self.devices,
            parts={name: parts for name, parts in placed.items() if parts != (PlacedPart(),)},
            stages=tuple(self.graph.ops[cut].name for cut in self._cuts),
            schedule=self.schedule,
            orders=tuple((self._chosen(a), self._chosen(b)) for a, b in self._orders),
            recomputed=self._groups(self.recompute_group),
            rerun=self._groups(lambda part: self.rerun_group(part.op)),
            swapped=self._groups(self.swap_group),
            on_host=tuple(sorted(self.on_host)),
            windows=tuple((tuple(map(self._chosen, w.ops)), w.gathers) for w in self.windows),
            notes=tuple(self.notes[len(self.graph.notes) :]),
        )

    def decide(self, decisions: Decisions) -> None:
        """Say all that ``decisions`` say; for a plan that says nothing yet.

        Raises:
            PlanError: they are about another model or other devices, or name what it has not; or
                the plan says something already.
        """
        if (decisions.model, decisions.devices) != (self.graph.name, self.devices):
            raise PlanError(
                f"decisions about {decisions.model} on devices {list(decisions.devices)}: the plan "
                f"is about {self.graph.name} on {list(self.devices)}."
            )
        if self.decisions != Decisions(self.graph.name, self.devices):
            raise PlanError("decide: the plan says something already; make a new one for these.")
        for name, placed in decisions.parts.items():
            op = self._op(name)
            self._parts[op.index] = parts = tuple(
                self._part(op, one.pieces, one.replica) for one in placed
            )
            for part, one in zip(parts, placed, strict=True):
                if one.device is not None:
                    self.op_assign(part, one.device)
        if decisions.stages:
            self.pipeline([self._op(name) for name in decisions.stages])
        if decisions.schedule is not None:
            self.op_order(decisions.schedule)
        for pair in decisions.orders:
            self.op_order(*map(self._meant, pair))
        self.recompute(*(map(self._meant, group) for group in decisions.recomputed))
        self.rerun(*([self._op(one.op) for one in group] for group in decisions.rerun))
        self.swap(*(map(self._meant, group) for group in decisions.swapped))
        if decisions.on_host:
            self.store_on_host(*decisions.on_host)
        for group, gathers in decisions.windows:
            say = self.gather_weights if gathers else self.reduce_grads
            say([self._op(one.op) for one in group])
        for note in decisions.notes:
            self.note(note)

    def copy(self) -> Plan:
        """Another plan that says the same."""
        made = Plan(self.graph, self.devices)
        made.decide(self.decisions)
        return made

    __copy__ = copy

    def _placed(self, op: Op) -> tuple[PlacedPart, ...]:
        parts = self.parts(op)
        return tuple(PlacedPart(part.pieces, part.replica, self.device(part)) for part in parts)

    def _chosen(self, what: Op | Part) -> Chosen:
        if isinstance(what, Op):
            return Chosen(what.name)
        return Chosen(what.op.name, (what.pieces, what.replica))

    def _groups(self, number: Callable[[Part], int]) -> tuple[tuple[Chosen, ...], ...]:
        """Groups of parts, given the number of each part's; of whole ops where that says it."""
        found: dict[int, list[Chosen]] = {}
        for op in self.graph.ops:
            parts = self.parts(op)
            numbers = [number(part) for part in parts]
            if len(set(numbers)) == 1:
                found.setdefault(numbers[0], []).append(self._chosen(op))
                continue
            for part, its_number in zip(parts, numbers, strict=True):
                found.setdefault(its_number, []).append(self._chosen(part))
        found.pop(0, None)
        return tuple(map(tuple, found.values()))

    @cached_property
    def _ops_by_name(self) -> Mapping[str, Op]:
        return {op.name: op for op in (*self.graph.ops, *self.graph.updates.values())}

    def _op(self, name: str) -> Op:
        if name not in self._ops_by_name:
            near = get_close_matches(name, self._ops_by_name, 3, 0.0)
            raise PlanError(f"{self.graph.name} has no op {name!r}; it has {', '.join(near)}.")
        return self._ops_by_name[name]

    def _part(self, op: Op, ranges: Sequence[Piece], replica: int) -> Part:
        """A part by hand.

        Raises:
            PlanError: the op has no such loop, it cannot be cut, or is shorter.
        """
        whole = Part(op)
        (made,) = pieces({loop: (lo, hi) for loop, lo, hi in ranges})(whole) if ranges else (whole,)
        return Part(op, made.pieces, replica)

    def _meant(self, chosen: Chosen) -> Op | Part:
        op = self._op(chosen.op)
        return op if chosen.part is None else self._part(op, *chosen.part)
