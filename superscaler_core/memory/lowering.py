"""Lowering: the instructions of a stage on one device, as effects on its memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from superscaler_core.graph.form import PartForm
from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.memory.edge_effects import EdgeEffects
from superscaler_core.memory.effects import (
    LOSS_GRAD,
    Effect,
    Numbers,
    SegmentShape,
    StageEffects,
    TrainedWeight,
)
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.functions import function_of
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.memory.terms import WEIGHTS, Statement, Terms, begin, freed
from superscaler_core.memory.window_effects import WindowEffects
from superscaler_core.plan import Device
from superscaler_core.program.flow import Flow, Held
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.verb import BETWEEN, MOVES, OF_WEIGHTS, Phase, Verb
from superscaler_core.run.tape import SegmentFunction
from superscaler_core.schedules import ActionKind

_FORWARDS = frozenset({ActionKind.FORWARD, ActionKind.TURN})


class Lowering:
    """Lowers the instructions of a stage on devices whose parts have equal shapes.

    The order is that of the highest device, and so are functions that say where their part lies:
    its causal attention sees the most keys. Values are those of the lowest device, for which the
    stage's program has found them already; on all of these devices they have equal forms.

    What an instruction reads is combined as the run time does it: the gradients that several
    readers give to a value, and the summands that an edge moves, are added up as they come.

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
        self._terms = Terms(stored.uses, made.plan.graph.loss.dtype)
        self._edges = EdgeEffects(made, self._here, self._flow, self._terms, self._places)
        self._windows = WindowEffects(made, self._here, stored, self._places)
        self.segments: dict[Segment, int] = {}

    def effects(self) -> StageEffects:
        """The effects of all runs of the stage."""
        runs = []
        for run in self._made.stages[self._stage].order:
            block = self._made.step_program.on(self._highest, self._stage, run)
            runs.append((run, tuple(self._lowered(block, run))))
        shapes = tuple(map(self._shape, self.segments))
        return StageEffects(
            len(self._places), tuple(runs), shapes, tuple(self._terms.outside.items())
        )

    def function(self, number: int) -> SegmentFunction:
        """The function of a segment."""
        device, segment = self._shown(list(self.segments)[number])
        return function_of(self._made, self._made.stages[self._stage].flow(device), segment)

    def _shown(self, segment: Segment) -> tuple[Device, Segment]:
        """The device whose function of a segment stands for those of all devices."""
        says_where = any(op.form.says_where for op in segment.ops)
        device = self._highest if says_where else self._here
        return device, self._made.segment(segment.name, device)

    def _lowered(self, block: Sequence[StepInstruction], run: ActionKind) -> Iterator[Effect]:
        self._terms.forget()
        statements = [
            statement
            for instruction in block if instruction.is_for(0)
            for statement in self._statements(instruction, run)
        ]  # fmt: skip
        if run in _FORWARDS:
            statements += self._edges.unsent(block)
        return freed(statements, self._terms.outside)

    def _statements(self, i: StepInstruction, run: ActionKind) -> Iterator[Statement]:
        if i.kind in OF_WEIGHTS:
            return self._windows.lower(i, run)
        if i.kind in MOVES or i.kind in BETWEEN:
            return self._edges.lower(i)
        return _LOWER[i.kind](self, i, run)

    @property
    def grads(self) -> Sequence[str]:
        """The names of gradients of weights, by number."""
        return list(self._windows.grads)

    # --- segments -------------------------------------------------------------------------------

    def _forward(self, i: StepInstruction, run: ActionKind) -> Iterator[Statement]:
        segment, mine = self._made.segment(i.name, self._here), self._flow.of[i.name]
        results = () if i.kind is Verb.HOLD else mine.results
        reads, makes = (
            tuple(self._terms.of(h, i.half) for h in each) for each in (mine.args, results)
        )
        yield self._running(i, segment, reads, makes)
        again = 0 if run in _FORWARDS else segment.span
        for held, number in zip(results, makes, strict=False):
            for edge in self._flow.summands.get(held.value, ()):
                if not again or self._flow.is_summed_in(edge, again):
                    yield from self._terms.add((edge, i.half), (number, None))

    def _backward(self, i: StepInstruction, _: ActionKind) -> Iterator[Statement]:
        mine, terms = self._flow.of[i.name], self._terms
        statement: Statement = []
        reads = []
        for held in mine.results:
            if held.value in mine.losses:
                reads.append(LOSS_GRAD)
            elif held.has_grad:
                taking, number = terms.taken(terms.grad(held.value, i.half))
                statement += taking
                reads.append(number)
        makes = tuple(terms.number((i.name, held.value.key, i.half)) for held in mine.inputs)
        segment = self._made.segment(i.name, self._here)
        yield statement + self._running(i, segment, tuple(reads), makes)
        for held, number in zip(mine.inputs, makes, strict=True):
            yield from terms.add_grad(held.value, i.half, (number, None))

    def _alone(self, i: StepInstruction, _: ActionKind) -> Iterator[Statement]:
        yield self._running(i, self._made.segment(i.name, self._here), (), ())

    def _copied(self, i: StepInstruction, _: ActionKind) -> Iterator[Statement]:
        # Memory leaves at the end of a copy to the host, and comes at the start of a copy back.
        if i.phase is not (Phase.START if i.kind is Verb.OUT else Phase.WAIT):
            yield self._running(i, self._made.segment(i.name, self._here), (), ())[1:]

    def _running(
        self, i: StepInstruction, segment: Segment, reads: Numbers, makes: Numbers
    ) -> Statement:
        number = self.segments.setdefault(segment, len(self.segments))
        args = i.kind, number, i.half or 0, reads, makes
        run = Effect(Fold.run_segment, args, (*reads, *makes))
        return [begin(self._places[segment]), run]

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
                grad = self._windows.number(use.name)
                yield TrainedWeight(position, grad, num_bytes, use.window is None, is_cast)

    # --- spans ----------------------------------------------------------------------------------

    def _span(self, i: StepInstruction) -> tuple[Hashable, Numbers]:
        span = int(i.name.rpartition("_span")[2])
        return (span, i.half), tuple(
            self._terms.of(held, i.half) for held in self._flow.entering(span)
        )

    def _keep(self, i: StepInstruction, _: ActionKind) -> Iterator[Statement]:
        span, entering = self._span(i)
        yield [Effect(Fold.keep_span, (span, entering), entering)]

    def _resume(self, i: StepInstruction, _: ActionKind) -> Iterator[Statement]:
        # What edges move is summed again.
        self._terms.forget((edge, i.half) for edge in self._flow.sent)
        span, entering = self._span(i)
        yield [Effect(Fold.resume_span, (span, entering), entering)]


_LOWER: Mapping[Verb, Callable[[Lowering, StepInstruction, ActionKind], Iterator[Statement]]] = {
    **dict.fromkeys((Verb.FORWARD, Verb.COMPUTE, Verb.HOLD), Lowering._forward),
    **dict.fromkeys((Verb.BACKWARD, Verb.BACKWARD_INPUTS), Lowering._backward),
    **dict.fromkeys((Verb.RERUN, Verb.BACKWARD_WEIGHTS), Lowering._alone),
    **dict.fromkeys((Verb.OUT, Verb.IN), Lowering._copied),
    Verb.KEEP: Lowering._keep,
    Verb.RESUME: Lowering._resume,
}


def segment_form(flow: Flow, segment: Segment, forms: Sequence[PartForm]) -> Hashable:
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
