"""Moves: what moves along legs between two layouts: one shard, in a Way, or many shards at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import Leg
from superscaler_core.run.transport import Call, Transport

Wait = Callable[[], Tensor | None]


@dataclass(frozen=True, slots=True)
class _LegHere:
    """A leg as one rank sees it.

    Attributes:
        call: the transport's call for the leg; None if every rank holds what it wants already.
        is_brought: whether this rank contributes a value.
        cut: the region of this rank's shard that it contributes; None for the whole shard.
        box: the region that this rank receives; None if it receives nothing.
    """

    call: Call | None
    is_brought: bool
    cut: tuple[slice, ...] | None
    box: rv.Box | None

    def piece(self, shard: Tensor | None) -> Tensor | None:
        """The value that this rank contributes to the leg."""
        if shard is None or not self.is_brought:
            return None
        return shard if self.cut is None else shard[self.cut]


class Way:
    """All legs between the two ends of an edge, prepared once for one rank.

    Args:
        transport: runs the legs.
        legs: in an order that is the same on all ranks.
        src, dst: the box that this rank holds at either end; None if it holds none.
    """

    def __init__(
        self, transport: Transport, legs: Sequence[Leg], src: rv.Box | None, dst: rv.Box | None
    ) -> None:
        self._legs = [_leg_here(transport, leg, src) for leg in legs]
        self._dst = dst
        # If this rank contributes nothing to any call, it can post its receives early.
        self._receiving = [] if src is not None else [c for leg in self._legs if (c := leg.call)]
        found = [leg.box for leg in self._legs if leg.box is not None]
        # Whether one leg brings everything that this rank receives.
        self._is_whole = dst is not None and found == [dst] and len(self._legs) == 1

    def move(self, shard: Tensor | None) -> Tensor | None:
        """Move a shard; return this rank's shard at the dst end, or None if it gets none."""
        return self._assembled([
            leg.piece(shard) if leg.call is None else leg.call.move(leg.piece(shard))
            for leg in self._legs
        ])  # fmt: skip

    def start(self, shard: Tensor | None) -> Wait:
        """Like ``move``, in the background; call the result to wait for it."""
        waits = [self._started(leg, leg.piece(shard)) for leg in self._legs]
        if self._is_whole:
            return waits[0]
        return lambda: self._assembled([wait() for wait in waits])

    def expect(self) -> None:
        """Post the receives of the next ``start``; only call this if that start will follow."""
        for call in self._receiving:
            call.expect()

    def forget(self) -> None:
        """Cancel ``expect``: the start will not follow."""
        for call in self._receiving:
            call.forget()

    def _started(self, leg: _LegHere, piece: Tensor | None) -> Wait:
        return (lambda: piece) if leg.call is None else leg.call.start(piece).wait

    def _assembled(self, results: Sequence[Tensor | None]) -> Tensor | None:
        """This rank's shard at the dst end, assembled from the results of the legs."""
        if self._is_whole:
            return results[0]
        if self._dst is None:
            return None
        pairs = zip(self._legs, results, strict=True)
        found = [(leg.box, result) for leg, result in pairs if leg.box and result is not None]
        assert found, "a leg brings every reader what it reads"
        if len(found) == 1 and found[0][0] == self._dst:
            return found[0][1]
        shard = torch.zeros(self._dst.shape, dtype=found[0][1].dtype, device=found[0][1].device)
        for box, result in found:
            shard[box.slices_within(self._dst)] = result
        return shard


def _leg_here(transport: Transport, leg: Leg, held: rv.Box | None) -> _LegHere:
    box = leg.src_box(transport.rank)
    is_brought = held is not None and box is not None
    cut = None
    if held is not None and box is not None and box != held:
        cut = box.slices_within(held)
    call = None if leg.is_idle else transport.call(leg)
    return _LegHere(call, is_brought, cut, leg.dst_box(transport.rank))


# --- many shards --------------------------------------------------------------------------------

Shard = tuple[Tensor, rv.Box]
"""A rank's shard of a tensor, and its box in the tensor."""

Moves = Mapping[str, tuple[Sequence[Leg], Shard | None]]
"""For each tensor, by name: its legs, and this rank's shard."""

Brought = Iterator[tuple[str, rv.Box, Tensor]]
"""For each result on this rank: the name of the tensor, the box in it, and the shard."""


def move_many(transport: Transport, moves: Moves) -> Brought:
    """Move many shards; legs of the same ranks share one call."""
    groups = _Groups(transport.rank, moves)
    yield from groups.staying
    for legs, pieces in groups.calls():
        yield from groups.brought(transport.move_many(legs, pieces))


def start_many(transport: Transport, moves: Moves) -> Callable[[], Brought]:
    """Like ``move_many``, in the background; call the result to wait for it."""
    groups = _Groups(transport.rank, moves)
    handles = [transport.start_many(legs, pieces) for legs, pieces in groups.calls()]

    def wait() -> Brought:
        yield from groups.staying
        for handle in handles:
            yield from groups.brought(handle.wait())

    return wait


class _Groups:
    """Legs grouped by their ranks; ``staying`` has the results that need no communication."""

    def __init__(self, rank: int, moves: Moves) -> None:
        self._rank = rank
        self._groups: dict[tuple[int, ...], dict[str, tuple[str, Leg, Tensor | None]]] = {}
        self.staying: list[tuple[str, rv.Box, Tensor]] = []
        for name, (legs, shard) in moves.items():
            for leg in legs:
                piece, box = _piece(rank, leg, shard), leg.dst_box(rank)
                if not leg.is_idle:
                    group = self._groups.setdefault(leg.ranks, {})
                    group[name + leg.box] = name, leg, piece
                elif piece is not None and box is not None:
                    self.staying.append((name, box, piece))
        self._entries = {k: e for group in self._groups.values() for k, e in group.items()}

    def calls(self) -> Iterator[tuple[dict[str, Leg], dict[str, Tensor]]]:
        """The legs and shards of every call, in an order that is the same on all ranks."""
        for _, group in sorted(self._groups.items()):
            pieces = {key: piece for key, (_, _, piece) in group.items() if piece is not None}
            yield {key: leg for key, (_, leg, _) in group.items()}, pieces

    def brought(self, results: Mapping[str, Tensor | None]) -> Brought:
        """The results of a call, with their boxes."""
        for key, result in results.items():
            name, leg, _ = self._entries[key]
            box = leg.dst_box(self._rank)
            if result is not None and box is not None:
                yield name, box, result


def _piece(rank: int, leg: Leg, shard: Shard | None) -> Tensor | None:
    """The part of a rank's shard that it contributes to a leg."""
    box = leg.src_box(rank)
    if shard is None or box is None:
        return None
    tensor, held = shard
    return tensor if box == held else tensor[box.slices_within(held)]
