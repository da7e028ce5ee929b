"""Stage program: the forward and the backward of one stage, written out for all devices.

Only this module decides in which order a stage runs, what is recomputed, and which segments have a
backward. Code generation, time and memory estimates, and reports all read its instructions.
"""

from __future__ import annotations

import heapq
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from typing import Any

from superscaler_core.known import Known
from superscaler_core.materialize.device_steps import Alike, DeviceSteps
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.ends import left, taken
from superscaler_core.materialize.flow import DeviceFlow, Sources
from superscaler_core.materialize.halves import reads_weights_late
from superscaler_core.materialize.operands import (
    FORWARDS,
    Flows,
    Operands,
    SegmentOperands,
    copies,
    entering_region,
    instruction_of,
    moved,
    moved_back,
    stored,
    sums,
)
from superscaler_core.materialize.segments import Segment, StageItems, Step
from superscaler_core.materialize.sequence import Close, Compute, MoveStep, Open
from superscaler_core.materialize.shapes import equal_shapes
from superscaler_core.plan import Device
from superscaler_core.plan.savings import FsdpUnit
from superscaler_core.program.freed import freed_block
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.together import together
from superscaler_core.program.verb import GOES_BACK, Verb
from superscaler_core.schedules import ActionKind

MAX_KNOWN = 1 << 5
"""Bound on cached results about a stage, such as its times on one kind of device."""

RUNS = (
    *(ActionKind.RECYCLE, ActionKind.FORWARD, ActionKind.RECOMPUTE),
    *(ActionKind.BACKWARD, ActionKind.INPUTS, ActionKind.WEIGHTS),
)
"""Kinds of runs of a stage, in the order of the text."""


@dataclass(frozen=True, eq=False)
class StageProgram:
    """The instructions of all devices in one stage for one microbatch.

    Laws (tests/superscaler_core/program/test_step_program.py): every ``BACKWARD`` uses what one
    earlier ``FORWARD`` or ``HOLD`` kept; a recording of the generated code equals the program, in
    the same order.

    Attributes:
        given: the items of the stage.
        sources: where parts read their inputs.
        leaving, arriving: the edges from the stage to others, and from others to it, in order.
    """

    given: StageItems
    sources: Sources
    leaving: tuple[Edge, ...] = ()
    arriving: tuple[Edge, ...] = ()

    @cached_property
    def steps(self) -> DeviceSteps:
        """For each device, its forward as segments and communication."""
        crossing = (*self.leaving, *self.arriving)
        return DeviceSteps(self.given, crossing, self.sources.inputs_of)

    def flow(self, device: Device) -> DeviceFlow:
        """The values that the steps of a device pass to each other."""
        if device not in self._flows:
            steps, ends = self.steps[device], (self.leaving, self.arriving)
            self._flows[device] = DeviceFlow(self.sources, device, steps, self.given.region, *ends)
        return self._flows[device]

    @cached_property
    def _flows(self) -> dict[Device, DeviceFlow]:
        return {}

    @cached_property
    def order(self) -> Mapping[ActionKind, tuple[StepInstruction, ...]]:
        """The instructions of all devices by kind of run, in an order that every device keeps.

        A stage has the runs that the schedule has for it. If there is a separate recomputation (R),
        it contains all recomputations, and B or I contains only the backward itself. I computes the
        gradients of segments' inputs, and has all communication of gradients; W computes those of
        weights.
        """
        runs = (run for run in RUNS if run in self.given.kinds)
        return {run: tuple(self._in_order(run)) for run in runs}

    @cached_property
    def whole(self) -> Mapping[ActionKind, Block]:
        """The same with what the stage takes from others and leaves for them, and what is freed."""
        return {
            kind: together(freed_block((*taken(self, kind), *block, *left(self, kind))))
            for kind, block in self.order.items()
        }

    # --- the order of all devices ---------------------------------------------------------------

    def _in_order(self, run: ActionKind) -> Iterator[StepInstruction]:
        """Merge the devices' steps: shared communication once, after the segments before it.

        All devices meet communication in the order of the stage's items. Between two
        communications, segments of different devices are merged in the order of their ops; so a
        later insertion at an op has one position for all devices. Alike devices are one row.
        """
        given, steps = self.given, self.steps
        left = {alike: list(self._one_way(alike.steps, run))[::-1] for alike in steps.alike}
        together = [item for item in given.items if not isinstance(item, Compute)]
        for wanted in self._one_way(together, run):
            if isinstance(wanted, _Border):
                continue
            devices = tuple(d for d in given.taking_part[wanted.step] if d in steps)
            before: dict[Alike, list[_Directed | _Border]] = {steps.like(d): [] for d in devices}
            for alike, alone in before.items():
                while (mine := left[alike].pop()) != wanted:
                    alone.append(mine)
            yield from self._side_by_side(before, run)
            yield from self._written(wanted, devices, run)
        yield from self._side_by_side({alike: rest[::-1] for alike, rest in left.items()}, run)

    def _side_by_side(
        self, alone: Mapping[Alike, Sequence[_Directed | _Border]], run: ActionKind
    ) -> Iterator[StepInstruction]:
        """Merge steps of devices that do not communicate, in the order of their ops."""
        rows = [
            [(place, alike.devices, directed) for place, directed in _placed(directed_steps)]
            for alike, directed_steps in alone.items()
        ]
        for _, devices, directed in heapq.merge(*rows, key=itemgetter(0)):
            yield from self._written(directed, devices, run)

    def _one_way(self, steps: Iterable[Step], run: ActionKind) -> Iterator[_Directed | _Border]:
        """Steps in the order of a run; a backward begins each region with its recomputation.

        A separate recomputation recomputations all regions, and then the backward recomputations
        none.
        """
        regions = [(region, list(mine)) for region, mine in groupby(steps, self.given.region)]
        is_back = run.goes_back or run is ActionKind.WEIGHTS
        for region, mine in regions[::-1] if is_back else regions:
            runs_again = run is ActionKind.RECOMPUTE or (run.goes_back and not self._is_apart)
            if region and (not is_back or runs_again):
                yield _Border(region)
            if run is ActionKind.RECOMPUTE or (region and runs_again):
                yield from (_Directed(step, is_again=True) for step in mine)
            elif not is_back:
                yield from (_Directed(step) for step in mine)
            if is_back:
                yield from (_Directed(step, is_back=True) for step in reversed(mine))

    # --- instructions ---------------------------------------------------------------------------

    def _written(
        self, directed: _Directed | _Border, devices: tuple[Device, ...], run: ActionKind
    ) -> Iterator[StepInstruction]:
        """The instructions of a step on these devices; none where there is nothing to do."""
        if not devices:
            return
        if isinstance(directed, _Border):
            name = f"stage{self.given.stage}_region{directed.region}"
            for verb in _border_verbs(run):
                yield instruction_of(
                    verb, name, devices, self._border(directed.region, devices, verb)
                )
            return
        step = directed.step
        if isinstance(step, Segment):
            mine = self.operands(devices[0])
            for verb in self._segment_verbs(step, directed, run):
                yield mine.of(verb, step.name, run, devices)
        elif isinstance(step, MoveStep):
            for verb in self._move_verbs(step, directed, run):
                yield self._move(step, verb, devices, run)
        elif isinstance(step, Open | Close):
            for verb in self._unit_verbs(step, directed, run):
                yield self._of_unit(step.unit, verb, devices, run)

    def _border(self, region: int, devices: Sequence[Device], verb: Verb) -> Operands:
        """The values that a region keeps, or takes for its recomputation."""
        entering = entering_region(region, self.flows(devices))
        return Operands(entering) if verb is Verb.KEEP else Operands((), entering)

    def _move(
        self, step: MoveStep, verb: Verb, devices: tuple[Device, ...], run: ActionKind
    ) -> StepInstruction:
        edge, flows = step.edge, self.flows(devices)
        again = 0 if run in FORWARDS else self.given.region(step)
        given, sub_transfers = moved(edge, flows, again), edge.forward
        if verb is Verb.MOVE_BACK:
            given, sub_transfers = moved_back(edge, flows), edge.backward
        stays = all(sub_transfer.is_idle for sub_transfer in sub_transfers)
        return instruction_of(verb, edge.name, devices, given, stays=stays)

    def _of_unit(
        self, unit: FsdpUnit, verb: Verb, devices: tuple[Device, ...], run: ActionKind
    ) -> StepInstruction:
        uses = self.sources.weights.of_unit.get(unit, ())
        # Copies that the step has fetched stay when an FSDP unit ends that only reduces gradients.
        mine = copies(uses, devices) if unit.unshards else ()
        given = Operands((), mine) if verb is Verb.UNSHARD else Operands(mine)
        if verb is Verb.REDUCE:
            is_open = run is not ActionKind.WEIGHTS or unit in self._read_late
            reads = (*sums(uses, self.trained_on, devices), *(mine if is_open else ()))
            given = Operands(reads, stored(uses, devices))
        return instruction_of(verb, self._name(unit), devices, given)

    def text_key(self, device: Device) -> Hashable:
        """A key that is equal for devices whose functions of the stage have the same text."""
        first = self.steps.like(device).devices[0]
        return first, self._flow_of[first].form_on(device)

    def flows(self, devices: Iterable[Device]) -> Flows:
        """The values that the steps of some devices pass, up to the boxes of the values."""
        known = self._flow_of
        found: dict[DeviceFlow, list[Device]] = {}
        for device in devices:
            if device in known:
                found.setdefault(known[device], []).append(device)
        return found

    @cached_property
    def _flow_of(self) -> Mapping[Device, DeviceFlow]:
        return {
            device: flow
            for alike in self.steps.alike for flow in [self.operands(alike.devices[0]).flow]
            for device in alike.devices
        }  # fmt: skip

    @cached_property
    def shapes(self) -> Mapping[Device, int]:
        """A number for each device; devices whose parts have equal shapes share it."""
        plan = self.given.plan
        return equal_shapes(plan, plan.stages[self.given.stage].ops)

    @cached_property
    def known(self) -> Known[Hashable, Any]:
        """What readers have found about the stage, by what they were asked."""
        return Known(MAX_KNOWN)

    def operands(self, device: Device) -> SegmentOperands:
        """The operands of the segments of a device, which alike devices share."""
        alike = self.steps.like(device)
        if alike not in self._operands:
            self._operands[alike] = SegmentOperands(self.flow(alike.devices[0]))
        return self._operands[alike]

    @cached_property
    def _operands(self) -> dict[Alike, SegmentOperands]:
        return {}

    @cached_property
    def with_loss(self) -> frozenset[Device]:
        """The devices that compute a part of the loss in this stage."""
        flows = self._flow_of.items()
        return frozenset(d for d, flow in flows if any(mine.losses for mine in flow.of.values()))

    @cached_property
    def trained_on(self) -> Mapping[str, frozenset[Device]]:
        """The devices whose segments add to the gradient of a use of a weight, by its name."""
        found: dict[str, frozenset[Device]] = {}
        for alike in self.steps.alike:
            for use in self.operands(alike.devices[0]).flow.trained:
                found[use] = found.get(use, frozenset()).union(alike.devices)
        return found

    def _segment_verbs(
        self, segment: Segment, directed: _Directed, run: ActionKind
    ) -> Iterator[Verb]:
        """The instructions of a segment; offloaded values come back before their first use."""
        is_recompute = segment.recompute and self._is_apart
        for verb in _run_verbs(segment, directed, run):
            if segment.swap and (verb is Verb.RECOMPUTE if is_recompute else verb in GOES_BACK):
                yield Verb.RELOAD
            yield verb
            if segment.swap and verb is Verb.FORWARD:
                yield Verb.OFFLOAD

    @property
    def _is_apart(self) -> bool:
        """Whether recomputation is a separate run (R)."""
        return ActionKind.RECOMPUTE in self.given.kinds

    def _move_verbs(self, move: MoveStep, directed: _Directed, run: ActionKind) -> Iterator[Verb]:
        if not directed.is_back:
            if run is not ActionKind.RECOMPUTE or self.given.region(move):
                yield Verb.MOVE
        elif run.goes_back and move.edge.backward:
            yield Verb.MOVE_BACK

    def _unit_verbs(
        self, step: Open | Close, directed: _Directed, run: ActionKind
    ) -> Iterator[Verb]:
        """Unshard and reshard so that a unit is open while any step in it reads its weights."""
        unit = step.unit
        begins = isinstance(step, Open) != directed.is_back
        is_open = unit.unshards
        if run is ActionKind.RECOMPUTE:
            is_open = unit.unshards and unit in self._run_again
        elif run is ActionKind.WEIGHTS:
            is_open = unit.unshards and unit in self._read_late
        if directed.is_back and not begins and run is not ActionKind.INPUTS:
            # A reduction also drops the weights.
            yield Verb.REDUCE
        elif is_open:
            yield Verb.UNSHARD if begins else Verb.RESHARD

    @cached_property
    def _run_again(self) -> frozenset[FsdpUnit]:
        """FSDP units in which, or around which, a recomputation takes place."""
        found: set[FsdpUnit] = set()
        opened: list[FsdpUnit] = []
        for item in self.given.items:
            if isinstance(item, Open):
                opened.append(item.unit)
            elif isinstance(item, Close):
                opened.remove(item.unit)
            if self.given.region(item) or (
                isinstance(item, Compute) and self.given.plan.recompute_group(item.part)
            ):
                found.update(opened)
        return frozenset(found)

    @cached_property
    def _read_late(self) -> frozenset[FsdpUnit]:
        """FSDP units of weights whose values W may read."""
        mine = (step for alike in self.steps.alike for step in alike.steps)
        segments = [step for step in mine if isinstance(step, Segment)]
        ops = {part.op for s in segments if reads_weights_late(s) for part in s.parts}
        units = (item.unit for item in self.given.items if isinstance(item, Open))
        return frozenset(unit for unit in units if not ops.isdisjoint(unit.ops))

    def _name(self, unit: FsdpUnit) -> str:
        return f"w{self.given.plan.fsdp_units.index(unit)}"


@dataclass(frozen=True, slots=True)
class _Directed:
    """A step with its direction: forward, forward again for a backward, or back."""

    step: Step
    is_back: bool = False
    is_again: bool = False


@dataclass(frozen=True, slots=True)
class _Border:
    """The begin of a region on a device: its inputs are kept, or taken for the recomputation."""

    region: int


def _placed(
    directed_steps: Sequence[_Directed | _Border],
) -> Iterator[tuple[int, _Directed | _Border]]:
    """Each step with the position of its op; a border has the position of the step after it."""
    place = 0
    found: list[tuple[int, _Directed | _Border]] = []
    for directed in reversed(directed_steps):
        if isinstance(directed, _Directed) and isinstance(directed.step, Segment):
            index = directed.step.parts[0].op.index
            place = -index if directed.is_back else index
        found.append((place, directed))
    return reversed(found)


def _border_verbs(run: ActionKind) -> Iterator[Verb]:
    if run is ActionKind.FORWARD:
        yield Verb.KEEP
    elif run is not ActionKind.RECYCLE:
        yield Verb.RESUME


def _run_verbs(segment: Segment, directed: _Directed, run: ActionKind) -> Iterator[Verb]:
    if directed.is_back:
        if segment.has_backward:
            yield from _back_verbs(segment, run)
        return
    if run is ActionKind.RECYCLE:
        yield Verb.COMPUTE
        return
    if not directed.is_again:
        # A segment that is recomputed later keeps nothing the first time.
        is_kept = segment.has_backward and not segment.region
        yield Verb.FORWARD if is_kept else Verb.COMPUTE
        return
    if segment.region and not (segment.is_left_out and not segment.has_backward):
        kept = Verb.HOLD if segment.is_left_out else Verb.FORWARD
        yield kept if segment.has_backward else Verb.COMPUTE
    if run is ActionKind.RECOMPUTE and segment.recompute and segment.has_backward:
        yield Verb.RECOMPUTE


def _back_verbs(segment: Segment, run: ActionKind) -> Iterator[Verb]:
    """The backward of a segment; without weights all of it is in I."""
    if run is ActionKind.WEIGHTS:
        if segment.has_weights:
            yield Verb.BACKWARD_WEIGHTS
    elif run is ActionKind.INPUTS and segment.has_weights:
        yield Verb.BACKWARD_INPUTS
    else:
        yield Verb.BACKWARD
