"""Moves: what moves along sub-transfers between two layouts: one shard, along a Route, or many
shards at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import SubTransfer
from superscaler_core.run.transport import Transport, TransportCall

Wait = Callable[[], Tensor | None]


@dataclass(frozen=True, slots=True)
class _SubTransferHere:
    """A sub-transfer as one rank sees it.

    Attributes:
        call: the transport's call for the sub-transfer; None if every rank holds what it wants
            already.
        is_brought: whether this rank contributes a value.
        cut: the region of this rank's shard that it contributes; None for the whole shard.
        box: the region that this rank receives; None if it receives nothing.
    """

    call: TransportCall | None
    is_brought: bool
    cut: tuple[slice, ...] | None
    box: rv.Box | None

    def piece(self, shard: Tensor | None) -> Tensor | None:
        """The value that this rank contributes to the sub-transfer."""
        if shard is None or not self.is_brought:
            return None
        return shard if self.cut is None else shard[self.cut]

    def moved(self, shard: Tensor | None) -> Tensor | None:
        """The value that this rank receives, once all ranks have called."""
        piece = self.piece(shard)
        return piece if self.call is None else self.call.move(piece)


class Route:
    """All sub-transfers between the two ends of an edge, prepared once for one rank.

    Args:
        transport: runs the sub-transfers.
        sub_transfers: in an order that is the same on all ranks.
        src, dst: the box that this rank holds at either end; None if it holds none.
    """

    def __init__(
        self,
        transport: Transport,
        sub_transfers: Sequence[SubTransfer],
        src: rv.Box | None,
        dst: rv.Box | None,
    ) -> None:
        self._sub_transfers = [
            _sub_transfer_here(transport, sub_transfer, src) for sub_transfer in sub_transfers
        ]
        self._dst = dst
        # If this rank contributes nothing to any call, it can post its receives early.
        self._receiving = (
            []
            if src is not None
            else [c for sub_transfer in self._sub_transfers if (c := sub_transfer.call)]
        )
        found = [
            sub_transfer.box for sub_transfer in self._sub_transfers if sub_transfer.box is not None
        ]
        # Whether one sub-transfer brings everything that this rank receives.
        self._is_whole = dst is not None and found == [dst] and len(self._sub_transfers) == 1

    def move(self, shard: Tensor | None) -> Tensor | None:
        """Move a shard; return this rank's shard at the dst end, or None if it gets none."""
        return self._assembled([each.moved(shard) for each in self._sub_transfers])

    def start(self, shard: Tensor | None) -> Wait:
        """Like ``move``, in the background; call the result to wait for it."""
        waits = [
            self._started(sub_transfer, sub_transfer.piece(shard))
            for sub_transfer in self._sub_transfers
        ]
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

    def _started(self, sub_transfer: _SubTransferHere, piece: Tensor | None) -> Wait:
        return (lambda: piece) if sub_transfer.call is None else sub_transfer.call.start(piece).wait

    def _assembled(self, results: Sequence[Tensor | None]) -> Tensor | None:
        """This rank's shard at the dst end, assembled from the results of the sub-transfers."""
        if self._is_whole:
            return results[0]
        if self._dst is None:
            return None
        pairs = zip(self._sub_transfers, results, strict=True)
        found = [
            (sub_transfer.box, result)
            for sub_transfer, result in pairs
            if sub_transfer.box and result is not None
        ]
        assert found, "a sub-transfer brings every reader what it reads"
        if len(found) == 1 and found[0][0] == self._dst:
            return found[0][1]
        shard = torch.zeros(self._dst.shape, dtype=found[0][1].dtype, device=found[0][1].device)
        for box, result in found:
            shard[box.slices_within(self._dst)] = result
        return shard


def _sub_transfer_here(
    transport: Transport, sub_transfer: SubTransfer, held: rv.Box | None
) -> _SubTransferHere:
    box = sub_transfer.src_box(transport.rank)
    is_brought = held is not None and box is not None
    cut = None
    if held is not None and box is not None and box != held:
        cut = box.slices_within(held)
    call = None if sub_transfer.is_idle else transport.call(sub_transfer)
    return _SubTransferHere(call, is_brought, cut, sub_transfer.dst_box(transport.rank))


# --- many shards --------------------------------------------------------------------------------

Shard = tuple[Tensor, rv.Box]
"""A rank's shard of a tensor, and its box in the tensor."""

Moves = Mapping[str, tuple[Sequence[SubTransfer], Shard | None]]
"""For each tensor, by name: its sub-transfers, and this rank's shard."""

Brought = Iterator[tuple[str, rv.Box, Tensor]]
"""For each result on this rank: the name of the tensor, the box in it, and the shard."""


def move_many(transport: Transport, moves: Moves) -> Brought:
    """Move many shards; sub-transfers of the same ranks share one call."""
    groups = _Groups(transport.rank, moves)
    yield from groups.staying
    for sub_transfers, pieces in groups.calls():
        yield from groups.brought(transport.move_many(sub_transfers, pieces))


def start_many(transport: Transport, moves: Moves) -> Callable[[], Brought]:
    """Like ``move_many``, in the background; call the result to wait for it."""
    groups = _Groups(transport.rank, moves)
    handles = [
        transport.start_many(sub_transfers, pieces) for sub_transfers, pieces in groups.calls()
    ]

    def wait() -> Brought:
        yield from groups.staying
        for handle in handles:
            yield from groups.brought(handle.wait())

    return wait


class _Groups:
    """Sub-transfers by their ranks; ``staying`` has the results that need no communication."""

    def __init__(self, rank: int, moves: Moves) -> None:
        self._rank = rank
        self._groups: dict[tuple[int, ...], dict[str, tuple[str, SubTransfer, Tensor | None]]] = {}
        self.staying: list[tuple[str, rv.Box, Tensor]] = []
        for name, (sub_transfers, shard) in moves.items():
            for sub_transfer in sub_transfers:
                piece, box = _piece(rank, sub_transfer, shard), sub_transfer.dst_box(rank)
                if not sub_transfer.is_idle:
                    group = self._groups.setdefault(sub_transfer.ranks, {})
                    group[name + sub_transfer.box] = name, sub_transfer, piece
                elif piece is not None and box is not None:
                    self.staying.append((name, box, piece))
        self._entries = {k: e for group in self._groups.values() for k, e in group.items()}

    def calls(self) -> Iterator[tuple[dict[str, SubTransfer], dict[str, Tensor]]]:
        """The sub-transfers and shards of every call, in an order that is the same on all ranks."""
        for _, group in sorted(self._groups.items()):
            pieces = {key: piece for key, (_, _, piece) in group.items() if piece is not None}
            yield {key: sub_transfer for key, (_, sub_transfer, _) in group.items()}, pieces

    def brought(self, results: Mapping[str, Tensor | None]) -> Brought:
        """The results of a call, with their boxes."""
        for key, result in results.items():
            name, sub_transfer, _ = self._entries[key]
            box = sub_transfer.dst_box(self._rank)
            if result is not None and box is not None:
                yield name, box, result


def _piece(rank: int, sub_transfer: SubTransfer, shard: Shard | None) -> Tensor | None:
    """The part of a rank's shard that it contributes to a sub-transfer."""
    box = sub_transfer.src_box(rank)
    if shard is None or box is None:
        return None
    tensor, held = shard
    return tensor if box == held else tensor[box.slices_within(held)]
