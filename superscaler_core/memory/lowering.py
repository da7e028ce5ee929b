"""Lowering: the instructions of a stage on one device, as effects on its memory."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence

from superscaler_core.graph.form import PartForm
from superscaler_core.graph.tensor import ITEM_BYTES, PTensor
from superscaler_core.memory.effects import (
    LOSS_GRAD,
    NOTHING,
    Combination,
    Effect,
    Numbers,
    SegmentShape,
    StageEffects,
    TrainedWeight,
)
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.functions import function_of
from superscaler_core.memory.piece import Strided
from superscaler_core.memory.stored import StoredMemory, copy_bytes
from superscaler_core.memory.terms import Statement, Terms, combine, freed, within
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.flow import Flow, Held
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.sequence import Close, Move, Open
from superscaler_core.program.side import Side
from superscaler_core.program.transfer import Transfer
from superscaler_core.program.value import IN_BLOCK, Role, Value
from superscaler_core.program.verb import COMPUTING, Phase, Verb
from superscaler_core.program.weights import Use
from superscaler_core.run.tape import SegmentFunction
from superscaler_core.schedules import ActionKind

_WEIGHTS = frozenset({Role.COPY, Role.WEIGHT})

_FORWARDS = frozenset({ActionKind.FORWARD, ActionKind.TURN})


class Lowering:
    """Lowers the instructions of a stage on devices whose parts have equal shapes.

    It lowers those of the lowest device. A function that says where its part lies is that of the
    highest one, whose causal attention sees the most keys.

    What an instruction reads is combined as the run time does it: the gradients that several
    readers give to a value, and the summands that an edge moves, are added up as they come.

    Args:
        made: the plan.
        stage: the stage.
        devices: the devices, ascending.
        stored: the plan's parameters.

    Attributes:
        segments: the segments, by number.
        grads: the names of gradients of weights, by number.
    """

    def __init__(
        self, made: Materialized, stage: int, devices: Sequence[Device], stored: StoredMemory
    ) -> None:
        self._made, self._stage, self._stored = made, stage, stored
        self._here, self._highest = devices[0], devices[-1]
        self._flow = made.stages[stage].flow(self._here)
        self._places = {step: n for n, step in enumerate(made.stages[stage].steps[self._here])}
        self._terms = Terms()
        self._outside = {LOSS_GRAD: Strided.new((), made.plan.graph.loss.dtype)}
        self.segments: dict[Segment, int] = {}
        self.grads: dict[str, int] = {}
        self._flying: dict[Hashable, Numbers] = {}
        self._run = ActionKind.FORWARD

    def effects(self) -> StageEffects:
        """The effects of all runs of the stage."""
        runs = []
        for run in self._made.stages[self._stage].order:
            block = self._made.step_program.on(self._here, self._stage, run)
            runs.append((run, tuple(self._lowered(block, run))))
        shapes = tuple(map(self._shape, self.segments))
        return StageEffects(len(self._places), tuple(runs), shapes, tuple(self._outside.items()))

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
        self._run = run
        self._terms.forget()
        statements = [
            statement
            for instruction in block if instruction.is_for(0)
            for statement in _LOWER[instruction.kind](self, instruction)
        ]  # fmt: skip
        if run in _FORWARDS:
            statements += self._unsent(block)
        return freed(statements, self._outside)

    # --- values ---------------------------------------------------------------------------------

    def _of(self, held: Held, half: int | None) -> int:
        """The number of a value; the memory of weights and of the batch is counted elsewhere."""
        value = held.value
        if value.role in IN_BLOCK:
            return self._terms.number((value.key, half))
        number = self._terms.number(value.key)
        if number not in self._outside:
            is_trained = value.role in _WEIGHTS and self._stored.uses[value.name].is_trained
            shape, dtype = held.box.shape, held.tensor.dtype
            self._outside[number] = Strided.new(shape, dtype, is_trained=is_trained)
        return number

    def _grad_of(self, value: Value, half: int | None) -> Hashable:
        """The key of the sum of a value's gradients."""
        return "grad", value.key, half

    # --- segments -------------------------------------------------------------------------------

    def _forward(self, i: StepInstruction) -> Iterator[Statement]:
        segment, mine = self._made.segment(i.name, self._here), self._flow.of[i.name]
        results = () if i.kind is Verb.HOLD else mine.results
        reads, makes = (tuple(self._of(h, i.half) for h in each) for each in (mine.args, results))
        yield self._running(i, segment, reads, makes)
        again = 0 if self._run in _FORWARDS else segment.span
        for held, number in zip(results, makes, strict=False):
            for edge in self._flow.summands.get(held.value, ()):
                if not again or self._flow.is_summed_in(edge, again):
                    yield from self._terms.add((edge, i.half), (number, None))

    def _backward(self, i: StepInstruction) -> Iterator[Statement]:
        mine, terms = self._flow.of[i.name], self._terms
        statement: Statement = []
        reads = []
        for held in mine.results:
            if held.value in mine.losses:
                reads.append(LOSS_GRAD)
            elif held.has_grad:
                taking, number = terms.taken(terms.sum(self._grad_of(held.value, i.half)))
                statement += taking
                reads.append(number)
        makes = tuple(terms.number((i.name, held.value.key, i.half)) for held in mine.inputs)
        segment = self._made.segment(i.name, self._here)
        yield statement + self._running(i, segment, tuple(reads), makes)
        for held, number in zip(mine.inputs, makes, strict=True):
            yield from terms.add(self._grad_of(held.value, i.half), (number, None))

    def _alone(self, i: StepInstruction) -> Iterator[Statement]:
        yield self._running(i, self._made.segment(i.name, self._here), (), ())

    def _copied(self, i: StepInstruction) -> Iterator[Statement]:
        # Memory leaves at the end of a copy to the host, and comes at the start of a copy back.
        if i.phase is not (Phase.START if i.kind is Verb.OUT else Phase.WAIT):
            yield self._running(i, self._made.segment(i.name, self._here), (), ())[1:]

    def _running(
        self, i: StepInstruction, segment: Segment, reads: Numbers, makes: Numbers
    ) -> Statement:
        number = self.segments.setdefault(segment, len(self.segments))
        args = i.kind, number, i.half or 0, reads, makes
        run = Effect(Fold.run_segment, args, (*reads, *makes))
        return [_begin(self._places[segment]), run]

    def _shape(self, segment: Segment) -> SegmentShape:
        mine = self._flow.of[segment.name]
        _, shown = self._shown(segment)
        form = segment_form(self._flow, segment, [part.form for part in shown.parts])
        trained = tuple(self._trained(mine.args))
        return SegmentShape(form, len(mine.inputs), segment.recompute, segment.swap, trained)

    def _trained(self, args: Sequence[Held]) -> Iterator[TrainedWeight]:
        for position, held in enumerate(args):
            use = self._stored.uses[held.value.name] if held.value.role in _WEIGHTS else None
            if use is not None and use.is_trained:
                item_bytes = self._stored.item_bytes(use.tensor)
                is_cast = item_bytes != ITEM_BYTES[use.tensor.dtype]
                num_bytes = held.box.num_elements * item_bytes
                grad = self._grad(use.name)
                yield TrainedWeight(position, grad, num_bytes, use.window is None, is_cast)

    def _grad(self, name: str) -> int:
        return self.grads.setdefault(name, len(self.grads))

    # --- spans ----------------------------------------------------------------------------------

    def _span(self, i: StepInstruction) -> tuple[Hashable, Numbers]:
        span = int(i.name.rpartition("_span")[2])
        return (span, i.half), tuple(self._of(held, i.half) for held in self._flow.entering(span))

    def _keep(self, i: StepInstruction) -> Iterator[Statement]:
        span, entering = self._span(i)
        yield [Effect(Fold.keep_span, (span, entering), entering)]

    def _resume(self, i: StepInstruction) -> Iterator[Statement]:
        # What edges move is summed again.
        self._terms.forget((edge, i.half) for edge in self._flow.sent)
        span, entering = self._span(i)
        yield [Effect(Fold.resume_span, (span, entering), entering)]

    # --- edges ----------------------------------------------------------------------------------

    def _packed(self, edge: Edge, half: int | None) -> tuple[Statement, int]:
        """The effects that make this device's shard of an edge, and its number."""
        if self._here not in edge.src.shards:
            return [], NOTHING
        if (total := self._terms.sum((edge, half))) is not None:
            return self._terms.taken(total)
        box, sent = edge.src.shards[self._here].box, self._flow.sent[edge]
        numbers = tuple(self._of(held, half) for held in sent)
        boxes = tuple(within(box, held.box) for held in sent)
        if len(sent) == 1:
            return self._terms.taken((numbers[0], boxes[0]))
        how = Combination(boxes)
        if not all(held.box.contains(box) for held in sent):
            how = Combination((), joined=(str(box), *(str(held.box) for held in sent)))
        return self._terms.combined(numbers, how)

    def _grad_packed(self, edge: Edge, half: int | None) -> tuple[Statement, int]:
        """The same for the gradient of what an edge has brought."""
        if self._here not in edge.dst.shards:
            return [], NOTHING
        value = self._flow.arrived(edge).value
        return self._terms.taken(self._terms.sum(self._grad_of(value, half)))

    def _unpacked(self, edge: Edge, half: int | None) -> Iterator[Statement]:
        """Pass the gradient of a shard on to the values that form the shard."""
        box, grad = edge.src.shards[self._here].box, self._moved_grad(edge, half)
        for held in self._flow.sent[edge]:
            term = grad, within(held.box, box)
            yield from self._terms.add(self._grad_of(held.value, half), term)

    def _moved_grad(self, edge: Edge, half: int | None) -> int:
        return self._terms.number((edge.name, "grad", half))

    def _move(self, i: StepInstruction) -> Iterator[Statement]:
        edge = self._made.edge(i.name)
        is_read = self._here in edge.dst.shards
        arrived = self._of(self._flow.arrived(edge), i.half) if is_read else NOTHING
        if i.phase is Phase.WAIT:
            yield self._waiting(i, edge)
        else:
            packing, shard = self._packed(edge, i.half)
            ends = edge.forward, edge.src, edge.dst
            yield packing + self._moving(i, edge, ends, shard, arrived)

    def _move_back(self, i: StepInstruction) -> Iterator[Statement]:
        edge = self._made.edge(i.name)
        is_read = self._here in edge.src.shards
        if i.phase is Phase.WAIT:
            yield self._waiting(i, edge)
        else:
            packing, shard = self._grad_packed(edge, i.half)
            grad = self._moved_grad(edge, i.half) if is_read else NOTHING
            ends = edge.backward, edge.dst, edge.src
            yield packing + self._moving(i, edge, ends, shard, grad)
        if is_read and i.phase is not Phase.START:
            yield from self._unpacked(edge, i.half)

    def _moving(
        self, i: StepInstruction, edge: Edge, ends: _Ends, shard: int, made: int
    ) -> Statement:
        legs, src, dst = ends
        stays = len(legs) == 1 and legs[0].is_idle and made != NOTHING
        begin: Statement = [_begin(self._places[Move(edge)])]
        if i.phase is Phase.START:
            self._flying[i.kind, edge, i.half] = shard, made
        if shard == NOTHING and self._here in src.shards:
            # No reader has given a gradient, so zeros move.
            shard = self._terms.new()
            begin.append(Effect(Fold.bring, (shard, self._form(edge, src)), (shard,)))
        elif stays and i.phase is Phase.WHOLE:
            begin = []
        if not stays:
            return [*begin, self._brought(edge, legs, dst, shard, made)]
        box = within(dst.shards[self._here].box, src.shards[self._here].box)
        return [*begin, combine((shard,), made, Combination((box,)))]

    def _waiting(self, i: StepInstruction, edge: Edge) -> Statement:
        """A value is held until it has left, together with the one that arrives."""
        uses = self._flying.pop((i.kind, edge, i.half))
        return [_begin(self._places[Move(edge)]), Effect(Fold.touch, (), uses)]

    def _form(self, edge: Edge, side: Side) -> Strided | None:
        shard = side.shards.get(self._here)
        return None if shard is None else Strided.new(shard.box.shape, edge.tensor.dtype)

    def _brought(
        self, edge: Edge, legs: Sequence[Transfer], dst: Side, shard: int, made: int
    ) -> Effect:
        here = self._here
        regions = (
            leg.dst.cell(here).box.num_elements
            for leg in legs
            if len(legs) > 1 and here in leg.dst and not leg.is_idle
        )
        passing_bytes = sum(regions) * ITEM_BYTES[edge.tensor.dtype]
        return Effect(Fold.bring, (made, self._form(edge, dst), passing_bytes), (shard, made))

    def _receive(self, i: StepInstruction) -> Iterator[Statement]:
        edge = self._made.edge(i.name)
        yield [self._taken(edge, edge.forward, self._of(self._flow.arrived(edge), i.half))]

    def _receive_back(self, i: StepInstruction) -> Iterator[Statement]:
        edge = self._made.edge(i.name)
        yield [self._taken(edge, edge.backward, self._moved_grad(edge, i.half))]
        yield from self._unpacked(edge, i.half)

    def _taken(self, edge: Edge, legs: Sequence[Transfer], made: int) -> Effect:
        """Take the value of a transfer between stages."""
        is_back = legs is edge.backward
        src, dst = (edge.dst, edge.src) if is_back else (edge.src, edge.dst)
        # A value that this device sent to itself is counted where it was made, and here only while
        # it is taken.
        is_own = self._here in src.shards and all(leg.is_idle for leg in legs)
        form = self._form(edge, dst)
        passing_bytes = form.num_bytes if is_own and form is not None else 0
        return Effect(Fold.bring, (made, form, passing_bytes, not is_own), (made,))

    def _send(self, i: StepInstruction) -> Iterator[Statement]:
        packing, shard = self._packed(self._made.edge(i.name), i.half)
        yield [*packing, Effect(Fold.touch, (), (shard,))]

    def _unsent(self, block: Sequence[StepInstruction]) -> Iterator[Statement]:
        """Hold to the end what only other turns send: one function runs all turns."""
        sent = {i.name for i in block if i.kind is Verb.SEND}
        for half in {i.half for i in block if i.kind in COMPUTING}:
            for edge in self._flow.leaving:
                if edge.name not in sent:
                    uses = tuple(self._of(held, half) for held in self._flow.sent[edge])
                    yield [Effect(Fold.touch, (), uses)]

    def _send_back(self, i: StepInstruction) -> Iterator[Statement]:
        packing, shard = self._grad_packed(self._made.edge(i.name), i.half)
        yield [*packing, Effect(Fold.touch, (), (shard,))]

    # --- weights --------------------------------------------------------------------------------

    def _of_weights(self, i: StepInstruction) -> Iterator[Statement]:
        # Gradients outside windows are counted at the step's end, and copies at its start.
        if not self._made.is_of_bucket(i):
            here, uses = self._here, self._made.uses_of(i)
            mine = [u for u in uses if here in u.side.shards or here in u.storage.shards]
            yield list(_OF_WINDOW[i.kind](self, i, mine))

    def _gather(self, i: StepInstruction, uses: Sequence[Use]) -> Iterator[Effect]:
        opened = self._opened(uses)
        # Weights that are stored on the host are first copied from it.
        arriving = opened + sum(self._stored.passing_bytes(use, self._here) for use in uses)
        if i.phase is Phase.START:
            yield _shift(buffers=arriving)
            return
        yield self._at_window(i, opens=not (self._run.goes_back or self._run is ActionKind.WEIGHTS))
        yield _shift(opened, passing_bytes=arriving if i.phase is Phase.WHOLE else 0)
        if i.phase is Phase.WAIT:
            yield _shift(buffers=-arriving)

    def _release(self, i: StepInstruction, uses: Sequence[Use]) -> Iterator[Effect]:
        # A backward of inputs (I) drops a window at the step that opens it in the forward; other
        # runs drop it at the step that closes it.
        yield self._at_window(i, opens=self._run is ActionKind.INPUTS)
        yield _shift(-self._opened(uses))

    def _reduce(self, i: StepInstruction, uses: Sequence[Use]) -> Iterator[Effect]:
        num_bytes, on_host = self._stored.stored_grad_bytes, self._made.plan.on_host
        arriving = sum(num_bytes(use, self._here) for use in uses)
        if i.phase is not Phase.WAIT:
            is_whole = i.phase is Phase.WHOLE
            yield self._at_window(i, opens=True)
            yield _shift(passing_bytes=arriving) if is_whole else _shift(buffers=arriving)
        else:
            yield _shift(buffers=-arriving)
        if i.phase is not Phase.START:
            stays = [u for u in uses if u.reduce and u.tensor.name not in on_host]
            stored = ((self._grad(_stored_name(u.tensor)), num_bytes(u, self._here)) for u in stays)
            gone = tuple(self._grad(use.name) for use in uses)
            yield Effect(Fold.reduce, (gone, tuple(stored)))
        is_open = any(value.role is Role.COPY for value in i.frees)
        if is_open and self._made.subject(i).gathers:
            yield _shift(-self._opened(uses))

    def _at_window(self, i: StepInstruction, *, opens: bool) -> Effect:
        window = self._made.subject(i)
        return _begin(self._places[Open(window) if opens else Close(window)])

    def _opened(self, uses: Iterable[Use]) -> int:
        """Bytes of copies of weights."""
        return sum(copy_bytes(use, self._here) for use in uses)


def _begin(place: int) -> Effect:
    return Effect(Fold.begin, (place,))


def _shift(opened: int = 0, buffers: int = 0, passing_bytes: int = 0) -> Effect:
    return Effect(Fold.shift, (opened, buffers, passing_bytes))


def _stored_name(tensor: PTensor) -> str:
    """The name of the gradient of a parameter where it is stored."""
    return f"{tensor.name} (stored)"


_Ends = tuple[Sequence[Transfer], Side, Side]
"""The transfers of a move, where they begin, and where they end."""

_LOWER: Mapping[Verb, Callable[[Lowering, StepInstruction], Iterator[Statement]]] = {
    **dict.fromkeys((Verb.FORWARD, Verb.COMPUTE, Verb.HOLD), Lowering._forward),
    **dict.fromkeys((Verb.BACKWARD, Verb.BACKWARD_INPUTS), Lowering._backward),
    **dict.fromkeys((Verb.RERUN, Verb.BACKWARD_WEIGHTS), Lowering._alone),
    **dict.fromkeys((Verb.OUT, Verb.IN), Lowering._copied),
    Verb.KEEP: Lowering._keep,
    Verb.RESUME: Lowering._resume,
    Verb.MOVE: Lowering._move,
    Verb.MOVE_BACK: Lowering._move_back,
    **dict.fromkeys((Verb.RECEIVE, Verb.RECYCLED), Lowering._receive),
    Verb.RECEIVE_BACK: Lowering._receive_back,
    Verb.SEND: Lowering._send,
    Verb.SEND_BACK: Lowering._send_back,
    **dict.fromkeys((Verb.GATHER, Verb.RELEASE, Verb.REDUCE, Verb.FETCH), Lowering._of_weights),
}

_OF_WINDOW: Mapping[
    Verb, Callable[[Lowering, StepInstruction, Sequence[Use]], Iterator[Effect]]
] = {Verb.GATHER: Lowering._gather, Verb.RELEASE: Lowering._release, Verb.REDUCE: Lowering._reduce}


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
