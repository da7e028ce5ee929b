"""Edge effects: what moves of values and gradients do to the memory of one device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence

from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.memory.effects import NOTHING, Combination, Effect, Numbers
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.piece import Strided
from superscaler_core.memory.terms import Statement, Terms, begin, combine, within
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.flow import Flow
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Step
from superscaler_core.program.sequence import Move
from superscaler_core.program.side import Side
from superscaler_core.program.transfer import Transfer
from superscaler_core.program.verb import COMPUTING, Phase, Verb


class EdgeEffects:
    """Lowers moves inside a stage, and what it takes from others and leaves for them.

    Args:
        made: the plan.
        here: the device.
        flow, terms: the values of the stage on the device, and their numbers.
        places: the places of the stage's steps.
    """

    def __init__(
        self,
        made: Materialized,
        here: Device,
        flow: Flow,
        terms: Terms,
        places: Mapping[Step, int],
    ) -> None:
        self._made, self._here, self._flow = made, here, flow
        self._terms, self._places = terms, places
        self._flying: dict[Hashable, Numbers] = {}

    def lower(self, i: StepInstruction) -> Iterator[Statement]:
        """The effects of an instruction."""
        return _LOWER[i.kind](self, i)

    def _packed(self, edge: Edge, half: int | None) -> tuple[Statement, int]:
        """The effects that make this device's shard of an edge, and its number."""
        if self._here not in edge.src.shards:
            return [], NOTHING
        if (total := self._terms.sum((edge, half))) is not None:
            return self._terms.taken(total)
        box, sent = edge.src.shards[self._here].box, self._flow.sent[edge]
        numbers = self._terms.all(sent, half)
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
        return self._terms.taken(self._terms.grad(value, half))

    def _unpacked(self, edge: Edge, half: int | None) -> Iterator[Statement]:
        """Pass the gradient of a shard on to the values that form the shard."""
        box, grad = edge.src.shards[self._here].box, self._moved_grad(edge, half)
        for held in self._flow.sent[edge]:
            term = grad, within(held.box, box)
            yield from self._terms.add_grad(held.value, half, term)

    def _moved_grad(self, edge: Edge, half: int | None) -> int:
        return self._terms.number((edge.name, "grad", half))

    def _move(self, i: StepInstruction) -> Iterator[Statement]:
        edge = self._made.edge(i.name)
        is_read = self._here in edge.dst.shards
        arrived = self._terms.of(self._flow.arrived(edge), i.half) if is_read else NOTHING
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
        before: Statement = [begin(self._places[Move(edge)])]
        if i.phase is Phase.START:
            self._flying[i.kind, edge, i.half] = shard, made
        if shard == NOTHING and self._here in src.shards:
            # No reader has given a gradient, so zeros move.
            shard = self._terms.new()
            before.append(Effect(Fold.bring, (shard, self._form(edge, src)), (shard,)))
        elif stays and i.phase is Phase.WHOLE:
            before = []
        if not stays:
            return [*before, self._brought(edge, legs, dst, shard, made)]
        box = within(dst.shards[self._here].box, src.shards[self._here].box)
        return [*before, combine((shard,), made, Combination((box,)))]

    def _waiting(self, i: StepInstruction, edge: Edge) -> Statement:
        """A value is held until it has left, together with the one that arrives."""
        uses = self._flying.pop((i.kind, edge, i.half))
        return [begin(self._places[Move(edge)]), Effect(Fold.touch, (), uses)]

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
        yield [self._taken(edge, edge.forward, self._terms.of(self._flow.arrived(edge), i.half))]

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

    def unsent(self, block: Sequence[StepInstruction]) -> Iterator[Statement]:
        """Hold to the end what only other turns send: one function runs all turns."""
        sent = {i.name for i in block if i.kind is Verb.SEND}
        for half in {i.half for i in block if i.kind in COMPUTING}:
            for edge in self._flow.leaving:
                if edge.name not in sent:
                    uses = self._terms.all(self._flow.sent[edge], half)
                    yield [Effect(Fold.touch, (), uses)]

    def _send_back(self, i: StepInstruction) -> Iterator[Statement]:
        packing, shard = self._grad_packed(self._made.edge(i.name), i.half)
        yield [*packing, Effect(Fold.touch, (), (shard,))]


_Ends = tuple[Sequence[Transfer], Side, Side]
"""The transfers of a move, where they begin, and where they end."""

_LOWER: Mapping[Verb, Callable[[EdgeEffects, StepInstruction], Iterator[Statement]]] = {
    Verb.MOVE: EdgeEffects._move,
    Verb.MOVE_BACK: EdgeEffects._move_back,
    **dict.fromkeys((Verb.RECEIVE, Verb.RECYCLED), EdgeEffects._receive),
    Verb.RECEIVE_BACK: EdgeEffects._receive_back,
    Verb.SEND: EdgeEffects._send,
    Verb.SEND_BACK: EdgeEffects._send_back,
}
