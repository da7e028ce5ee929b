"""Moves: what communication inside a stage, and at its ends, does to the memory of one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import rvdcomm as rv
from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.flow import DeviceFlow, partial_of
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Step
from superscaler_core.materialize.sequence import Close, MoveStep, Open
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.materialize.weights import Use
from superscaler_core.memory.effects import NOTHING, MemoryEffect, Numbering, Numbers, Term
from superscaler_core.memory.fold import Fold
from superscaler_core.memory.meta import Index, Strided
from superscaler_core.memory.stored import StoredMemory, copy_bytes
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.value import Role
from superscaler_core.program.verb import MOVES, Phase, Verb
from superscaler_core.schedules import ActionKind


class EdgeEffects:
    """Lowers moves inside a stage, and what it takes from others and leaves for them.

    What a device writes to an edge is a *shard*: a value of its own, which lies in the memory of
    the value that is moved, or is the sum of several.

    Args:
        made: the plan.
        here: the device.
        flow, numbers: the values of the stage on the device, and their numbers.
        places: the places of the stage's steps.
    """

    def __init__(
        self,
        made: Materialized,
        here: Device,
        flow: DeviceFlow,
        numbers: Numbering,
        places: Mapping[Step, int],
    ) -> None:
        self._made, self._here, self._flow = made, here, flow
        self._numbers, self._places = numbers, places

    def lower(self, i: StepInstruction, gone: Numbers) -> Iterator[MemoryEffect]:
        """The effects of an instruction; ``gone`` are values that it frees."""
        edge = self._made.edge(i.name)
        is_back = i.kind in _BACK
        shard = self._numbers.number((i.kind, i.name, i.half))
        if i.kind in _TAKES:
            yield self._taken(edge, is_back, self._made_by(edge, is_back, i.half))
        elif i.phase is Phase.WAIT:
            # A value is held until it has left, together with the one that arrives.
            yield from (_begin(self._places[MoveStep(edge)]), MemoryEffect(Fold.touch))
        elif i.kind in MOVES:
            yield from self._moved(i, edge, is_back, shard)
        else:
            yield from (*self._packed(i, edge, is_back, shard), MemoryEffect(Fold.touch))
        if i.phase is not Phase.START:
            gone = (*gone, shard)
        yield MemoryEffect(Fold.free, (gone,))
        if i.kind in _UNPACKS and self._here in edge.src.shards and i.phase is not Phase.START:
            yield from self._unpacked(edge, i.half)

    def _made_by(self, edge: Edge, is_back: bool, half: int | None) -> int:
        """The number of what a move brings to the device."""
        if self._here not in (edge.src if is_back else edge.dst).shards:
            return NOTHING
        if is_back:
            return self._numbers.number((edge.name, "grad", half))
        return self._numbers.of(self._flow.arrived(edge), half)

    # --- what leaves the device -----------------------------------------------------------------

    def _packed(
        self, i: StepInstruction, edge: Edge, is_back: bool, shard: int
    ) -> Sequence[MemoryEffect]:
        """Make this device's shard of what an edge moves, if it has any."""
        sharding = edge.dst if is_back else edge.src
        if self._here not in sharding.shards:
            return ()
        if is_back:
            value = self._flow.arrived(edge).value
            if not self._flow.grads.get(value):
                return ()
            grad = self._numbers.grad(value, i.half)
            return (
                MemoryEffect(Fold.pack, (shard, ((grad, None),))),
                MemoryEffect(Fold.free, ((grad,),)),
            )
        return (
            MemoryEffect(
                Fold.pack, (shard, *self._terms(i, edge, sharding.shards[self._here].box))
            ),
        )

    def _terms(
        self, i: StepInstruction, edge: Edge, box: rv.Box
    ) -> tuple[tuple[Term, ...], tuple[str, ...]]:
        """The values that form a shard; and their boxes as texts, if they are joined."""
        partial = partial_of(edge)
        if any(value.is_same(partial) for value in i.reads):
            return ((self._numbers.of_run(partial, i.half), None),), ()
        sent = self._flow.sent[edge]
        numbers = self._numbers.all(sent, i.half)
        if all(held.box.contains(box) for held in sent):
            boxes = (within(box, held.box) for held in sent)
            return tuple(zip(numbers, boxes, strict=True)), ()
        return tuple((n, None) for n in numbers), (str(box), *(str(held.box) for held in sent))

    # --- what arrives ---------------------------------------------------------------------------

    def _moved(
        self, i: StepInstruction, edge: Edge, is_back: bool, shard: int
    ) -> Iterator[MemoryEffect]:
        sub_transfers, src, dst = _ends(edge, is_back)
        made = self._made_by(edge, is_back, i.half)
        packed = self._packed(i, edge, is_back, shard)
        yield from packed
        stays = len(sub_transfers) == 1 and sub_transfers[0].is_idle and made != NOTHING
        is_zero = not packed and self._here in src.shards
        if is_zero or not stays or i.phase is Phase.START:
            yield _begin(self._places[MoveStep(edge)])
        if is_zero:
            # No reader has given a gradient, so zeros move.
            yield MemoryEffect(Fold.bring, (shard, self._form(edge, src)))
        if stays:
            box = within(dst.shards[self._here].box, src.shards[self._here].box)
            yield MemoryEffect(Fold.pack, (made, ((shard, box),)))
        else:
            yield self._brought(edge, sub_transfers, dst, made)

    def _form(self, edge: Edge, sharding: Sharding) -> Strided | None:
        shard = sharding.shards.get(self._here)
        return None if shard is None else Strided.new(shard.box.shape, edge.tensor.dtype)

    def _brought(
        self, edge: Edge, sub_transfers: Sequence[Transfer], dst: Sharding, made: int
    ) -> MemoryEffect:
        here = self._here
        regions = (
            sub_transfer.dst.cell(here).box.num_elements
            for sub_transfer in sub_transfers
            if len(sub_transfers) > 1 and here in sub_transfer.dst and not sub_transfer.is_idle
        )
        passing_bytes = sum(regions) * ITEM_BYTES[edge.tensor.dtype]
        return MemoryEffect(Fold.bring, (made, self._form(edge, dst), passing_bytes))

    def _taken(self, edge: Edge, is_back: bool, made: int) -> MemoryEffect:
        """Take the value of a transfer between stages."""
        sub_transfers, src, dst = _ends(edge, is_back)
        # A value that this device sent to itself is counted where it was made, and here only while
        # it is taken.
        is_own = self._here in src.shards and all(
            sub_transfer.is_idle for sub_transfer in sub_transfers
        )
        form = self._form(edge, dst)
        passing_bytes = form.num_bytes if is_own and form is not None else 0
        return MemoryEffect(Fold.bring, (made, form, passing_bytes, not is_own))

    def _unpacked(self, edge: Edge, half: int | None) -> Iterator[MemoryEffect]:
        """Pass the gradient of a shard on to the values that form the shard."""
        box, grad = edge.src.shards[self._here].box, self._made_by(edge, True, half)
        for held in self._flow.sent[edge]:
            total = self._numbers.grad(held.value, half)
            yield MemoryEffect(Fold.add, (total, grad, within(held.box, box)))
        yield MemoryEffect(Fold.free, ((grad,),))


_BACK = frozenset({Verb.MOVE_BACK, Verb.SEND_BACK, Verb.RECEIVE_BACK})
_TAKES = frozenset({Verb.RECEIVE, Verb.RECYCLED, Verb.RECEIVE_BACK})
_UNPACKS = frozenset({Verb.MOVE_BACK, Verb.RECEIVE_BACK})


def _ends(edge: Edge, is_back: bool) -> tuple[Sequence[Transfer], Sharding, Sharding]:
    """The transfers of a move, where they begin, and where they end."""
    if is_back:
        return edge.backward, edge.dst, edge.src
    return edge.forward, edge.src, edge.dst


def within(box: rv.Box, outer: rv.Box) -> Index:
    """The index of a box in a tensor that holds ``outer``."""
    if box == outer:
        return None
    return tuple((lo - low, hi - low) for lo, hi, low in zip(box.lo, box.hi, outer.lo, strict=True))


def _begin(place: int) -> MemoryEffect:
    """A step of the stage begins."""
    return MemoryEffect(Fold.begin, (place,))


# --- weights ------------------------------------------------------------------------------------


class UnitEffects:
    """Lowers gathers, releases and reductions of weights in FSDP units.

    Args:
        made: the plan.
        here: the device.
        stored: the plan's parameters.
        places: the places of the stage's steps.

    Attributes:
        grads: the names of gradients of weights, by number.
    """

    def __init__(
        self, made: Materialized, here: Device, stored: StoredMemory, places: Mapping[Step, int]
    ) -> None:
        self._made, self._here, self._stored, self._places = made, here, stored, places
        self.grads: dict[str, int] = {}

    def number(self, name: str) -> int:
        """The number of a gradient of a weight."""
        return self.grads.setdefault(name, len(self.grads))

    def lower(self, i: StepInstruction, run: ActionKind) -> Iterator[MemoryEffect]:
        """The effects of an instruction in a run of the stage."""
        # Gradients outside FSDP units are counted at the step's end, and copies at its start.
        if not self._made.is_of_bucket(i):
            here, uses = self._here, self._made.uses_of(i)
            mine = [u for u in uses if here in u.sharding.shards or here in u.storage.shards]
            yield from _OF_UNIT[i.kind](self, i, mine, run)

    def _unshard(
        self, i: StepInstruction, uses: Sequence[Use], run: ActionKind
    ) -> Iterator[MemoryEffect]:
        opened = self._opened(uses)
        # Weights that are stored on the host are first copied from it.
        arriving = opened + sum(self._stored.passing_bytes(use, self._here) for use in uses)
        if i.phase is Phase.START:
            yield _shift(buffers=arriving)
            return
        yield self._at_unit(i, opens=not (run.goes_back or run is ActionKind.WEIGHTS))
        yield _shift(opened, passing_bytes=arriving if i.phase is Phase.WHOLE else 0)
        if i.phase is Phase.WAIT:
            yield _shift(buffers=-arriving)

    def _reshard(
        self, i: StepInstruction, uses: Sequence[Use], run: ActionKind
    ) -> Iterator[MemoryEffect]:
        # A backward of inputs (I) drops an FSDP unit at the step that opens it in the forward;
        # other runs drop it at the step that closes it.
        yield self._at_unit(i, opens=run is ActionKind.INPUTS)
        yield _shift(-self._opened(uses))

    def _reduce(
        self, i: StepInstruction, uses: Sequence[Use], _: ActionKind
    ) -> Iterator[MemoryEffect]:
        num_bytes, on_host = self._stored.stored_grad_bytes, self._made.plan.on_host
        arriving = sum(num_bytes(use, self._here) for use in uses)
        if i.phase is not Phase.WAIT:
            is_whole = i.phase is Phase.WHOLE
            yield self._at_unit(i, opens=True)
            yield _shift(passing_bytes=arriving) if is_whole else _shift(buffers=arriving)
        else:
            yield _shift(buffers=-arriving)
        if i.phase is not Phase.START:
            stays = [u for u in uses if u.reduce and u.tensor.name not in on_host]
            stored = (
                (self.number(f"{u.tensor.name} (stored)"), num_bytes(u, self._here)) for u in stays
            )
            gone = tuple(self.number(use.name) for use in uses)
            yield MemoryEffect(Fold.reduce, (gone, tuple(stored)))
        is_open = any(value.role is Role.COPY for value in i.frees)
        if is_open and self._made.subject(i).unshards:
            yield _shift(-self._opened(uses))

    def _at_unit(self, i: StepInstruction, *, opens: bool) -> MemoryEffect:
        unit = self._made.subject(i)
        return _begin(self._places[Open(unit) if opens else Close(unit)])

    def _opened(self, uses: Iterable[Use]) -> int:
        """Bytes of copies of weights."""
        return sum(copy_bytes(use, self._here) for use in uses)


def _shift(opened: int = 0, buffers: int = 0, passing_bytes: int = 0) -> MemoryEffect:
    return MemoryEffect(Fold.shift, (opened, buffers, passing_bytes))


_OF_UNIT: Mapping[
    Verb,
    Callable[[UnitEffects, StepInstruction, Sequence[Use], ActionKind], Iterator[MemoryEffect]],
] = {
    Verb.UNSHARD: UnitEffects._unshard,
    Verb.RESHARD: UnitEffects._reshard,
    Verb.REDUCE: UnitEffects._reduce,
}
