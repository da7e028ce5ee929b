"""Lowering: the instructions of a stage on one device, as effects on its memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from superscaler_core.codegen.line_writer import LineWriter
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segment_writer import SegmentWriter
from superscaler_core.graph.form import PartForm
from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.materialize.flow import DeviceFlow, Held, partial_of
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.operands import FORWARDS
from superscaler_core.materialize.segments import Segment
from superscaler_core.memory.effects import (
    LOSS_GRAD,
    NOTHING,
    WEIGHTS,
    MemoryEffect,
    Numbering,
    Numbers,
    SegmentShape,
    StageEffects,
    TrainedWeight,
)
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.moves import EdgeEffects, UnitEffects
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import IN_BLOCK, Role
from superscaler_core.program.verb import BETWEEN, MOVES, OF_WEIGHTS, Phase, Verb
from superscaler_core.run.evaluate import code_names
from superscaler_core.run.tape import SegmentFunction
from superscaler_core.schedules import ActionKind

_HELD = IN_BLOCK - {Role.GRAD}
"""Roles of values that a program frees one by one; gradients are freed as sums."""


class Lowering:
    """Lowers the instructions of a stage on devices whose parts have equal shapes.

    The order is that of the highest device, and so are functions that say where their part lies:
    its causal attention sees the most keys. Values are those of the lowest device, for which the
    stage's program has found them already; on all of these devices they have equal forms.

    Args:
        made: the plan.
        stage: the stage.
        devices: the devices, ascending.
        stored: the plan's parameters.

    Attributes:
        segments: the segments, by number.
    """

    def __init__(
        self, made: Materialized, stage: int, devices: Sequence[Device], stored: StoredMemory
    ) -> None:
        self._made, self._stage, self._stored = made, stage, stored
        self._here, self._highest = devices[0], devices[-1]
        self._flow = made.stages[stage].flow(self._here)
        self._places = {step: n for n, step in enumerate(made.stages[stage].steps[self._here])}
        self._numbers = Numbering(stored.uses, made.plan.graph.loss.dtype)
        self._edges = EdgeEffects(made, self._here, self._flow, self._numbers, self._places)
        self._units = UnitEffects(made, self._here, stored, self._places)
        self.segments: dict[Segment, int] = {}

    def effects(self) -> StageEffects:
        """The effects of all runs of the stage."""
        runs = []
        for run in self._made.stages[self._stage].order:
            block = self._made.step_program.on(self._highest, self._stage, run)
            mine = [i for i in block if i.is_for(0)]
            runs.append((run, tuple(self._lowered(mine, run))))
        shapes = tuple(map(self._shape, self.segments))
        outside = tuple(self._numbers.outside.items())
        return StageEffects(len(self._places), tuple(runs), shapes, outside)

    def function(self, number: int) -> SegmentFunction:
        """The function of a segment, as generated code has it."""
        device, segment = self._shown(list(self.segments)[number])
        flow = self._made.stages[self._stage].flow(device)
        scope = {name: x for op in segment.ops for name, x in code_names(op).items()}
        writer = SegmentWriter(self._made, flow, LineWriter(self._made, Names()))
        exec(writer.function(segment), scope)
        function: SegmentFunction = scope[segment.name]
        return function

    @property
    def grads(self) -> Sequence[str]:
        """The names of gradients of weights, by number."""
        return list(self._units.grads)

    def _shown(self, segment: Segment) -> tuple[Device, Segment]:
        """The device whose function of a segment stands for those of all devices."""
        says_where = any(op.form.says_where for op in segment.ops)
        device = self._highest if says_where else self._here
        return device, self._made.segment(segment.name, device)

    def _lowered(self, block: Sequence[StepInstruction], run: ActionKind) -> Iterator[MemoryEffect]:
        unsent = self._unsent(block) if run in FORWARDS else frozenset()
        for i in block:
            gone = [
                self._numbers.of_run(value, i.half)
                for value in i.frees if value.role in _HELD and value.key not in unsent
                if not value.devices or self._highest in value.devices
            ]  # fmt: skip
            if i.kind in OF_WEIGHTS:
                yield from self._units.lower(i, run)
            elif i.kind in MOVES or i.kind in BETWEEN:
                yield from self._edges.lower(i, tuple(gone))
            else:
                yield from _LOWER[i.kind](self, i, tuple(gone))
        halves = {i.half for i in block} if unsent else ()
        for half in halves:
            yield MemoryEffect(Fold.free, (tuple(self._numbers.number((k, half)) for k in unsent),))

    def _unsent(self, block: Sequence[StepInstruction]) -> Sequence[str]:
        """What only other passes send: in a file it lives to the end, as one function runs them."""
        sent = {i.name for i in block if i.kind is Verb.SEND}
        unsent = [edge for edge in self._flow.leaving if edge.name not in sent]
        return list(dict.fromkeys(h.value.key for e in unsent for h in self._flow.sent[e]))

    # --- segments -------------------------------------------------------------------------------

    def _forward(self, i: StepInstruction, gone: Numbers) -> Iterator[MemoryEffect]:
        segment, mine = self._made.segment(i.name, self._here), self._flow.of[i.name]
        results = () if i.kind is Verb.HOLD else mine.results
        reads, makes = (self._numbers.all(each, i.half) for each in (mine.args, results))
        yield from self._running(i, segment, reads, makes)
        partials = {v.key for v in i.writes if v.role is Role.PARTIAL}
        adds = [
            (self._numbers.of_run(partial_of(edge), i.half), number, None)
            for held, number in zip(results, makes, strict=True)
            for edge in self._flow.summands.get(held.value, ())
            if partial_of(edge).key in partials
        ]
        summed = {number for total, term, _ in adds for number in (total, term)}
        yield MemoryEffect(Fold.free, (tuple(number for number in gone if number not in summed),))
        yield from (MemoryEffect(Fold.add, add) for add in adds)
        if adds:
            yield MemoryEffect(Fold.free, (tuple(number for number in gone if number in summed),))

    def _backward(self, i: StepInstruction, gone: Numbers) -> Iterator[MemoryEffect]:
        mine, numbers = self._flow.of[i.name], self._numbers
        grads = {
            held.value: numbers.grad(held.value, i.half)
            for held in mine.results if self._flow.grads.get(held.value)
        }  # fmt: skip
        reads = tuple(
            LOSS_GRAD if held.value in mine.losses else grads.get(held.value, NOTHING)
            for held in mine.results if held.has_grad or held.value in mine.losses
        )  # fmt: skip
        makes = tuple(numbers.number((i.name, held.value.key, i.half)) for held in mine.inputs)
        segment = self._made.segment(i.name, self._here)
        yield from self._running(i, segment, reads, makes)
        yield MemoryEffect(Fold.free, ((*gone, *grads.values()),))
        for held, number in zip(mine.inputs, makes, strict=True):
            yield MemoryEffect(Fold.add, (numbers.grad(held.value, i.half), number, None))
            yield MemoryEffect(Fold.free, ((number,),))

    def _alone(self, i: StepInstruction, gone: Numbers) -> Iterator[MemoryEffect]:
        yield from self._running(i, self._made.segment(i.name, self._here), (), ())

    def _copied(self, i: StepInstruction, gone: Numbers) -> Iterator[MemoryEffect]:
        # Memory leaves at the end of a copy to the host, and comes at the start of a copy back.
        if i.phase is not (Phase.START if i.kind is Verb.OFFLOAD else Phase.WAIT):
            yield self._running(i, self._made.segment(i.name, self._here), (), ())[1]

    def _running(
        self, i: StepInstruction, segment: Segment, reads: Numbers, makes: Numbers
    ) -> tuple[MemoryEffect, MemoryEffect]:
        number = self.segments.setdefault(segment, len(self.segments))
        run = MemoryEffect(Fold.run_segment, (i.kind, number, i.half or 0, reads, makes))
        return MemoryEffect(Fold.begin, (self._places[segment],)), run

    def _shape(self, segment: Segment) -> SegmentShape:
        mine = self._flow.of[segment.name]
        _, shown = self._shown(segment)
        form = segment_form(self._flow, segment, [part.form for part in shown.parts])
        trained = tuple(self._trained(mine.args))
        return SegmentShape(form, len(mine.inputs), segment.recompute, segment.swap, trained)

    def _trained(self, args: Sequence[Held]) -> Iterator[TrainedWeight]:
        for position, held in enumerate(args):
            use = self._stored.uses[held.value.name] if held.value.role in WEIGHTS else None
            if use is not None and use.is_trained:
                item_bytes = self._stored.item_bytes(use.tensor)
                is_cast = item_bytes != ITEM_BYTES[use.tensor.dtype]
                num_bytes = held.box.num_elements * item_bytes
                grad = self._units.number(use.name)
                yield TrainedWeight(position, grad, num_bytes, use.unit is None, is_cast)

    # --- regions ----------------------------------------------------------------------------------

    def _region(self, i: StepInstruction, gone: Numbers) -> Iterator[MemoryEffect]:
        """The values that enter a region are kept, or taken for its recomputation."""
        entering = self._flow.entering(int(i.name.rpartition("_region")[2]))
        values = self._numbers.all(entering, i.half)
        do = Fold.keep_region if i.kind is Verb.KEEP else Fold.resume_region
        yield MemoryEffect(do, (self._numbers.number((i.name, i.half)), values))
        yield MemoryEffect(Fold.free, (gone,))


_LOWER: Mapping[Verb, Callable[[Lowering, StepInstruction, Numbers], Iterator[MemoryEffect]]] = {
    **dict.fromkeys((Verb.FORWARD, Verb.COMPUTE, Verb.HOLD), Lowering._forward),
    **dict.fromkeys((Verb.BACKWARD, Verb.BACKWARD_INPUTS), Lowering._backward),
    **dict.fromkeys((Verb.RECOMPUTE, Verb.BACKWARD_WEIGHTS), Lowering._alone),
    **dict.fromkeys((Verb.OFFLOAD, Verb.RELOAD), Lowering._copied),
    **dict.fromkeys((Verb.KEEP, Verb.RESUME), Lowering._region),
}


def segment_form(flow: DeviceFlow, segment: Segment, forms: Sequence[PartForm]) -> Hashable:
    """A key that is equal for segments whose functions do the same, whatever the names.

    Args:
        flow: the values of the stage.
        segment: the segment.
        forms: the forms of its parts.
    """
    mine = flow.of[segment.name]
    numbers: dict[str, int] = {}

    def number(held: Held) -> int:
        return numbers.setdefault(held.value.key, len(numbers))

    given = tuple(map(number, mine.args))
    parts = []
    for part, form in zip(segment.parts, forms, strict=True):
        read = (
            tuple((number(held), held.box) for held in flow.read(part, i))
            for i in range(len(part.op.inputs))
        )
        made = (number(flow.result(part, i)) for i in range(len(part.op.outputs)))
        parts.append((form, tuple(read), tuple(made)))
    places = {part: place for place, part in enumerate(segment.parts)}
    sums = tuple((places[a], places[b]) for a, b in segment.products.items())
    return given, tuple(parts), sums, tuple(map(number, mine.results))
