"""Moves: many shards at one time, those of the same ranks in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import Leg
from superscaler_core.run.transport import Transport

Shard = tuple[Tensor, rv.Box]
"""What a rank holds of a tensor, and which box of it that is."""

Moves = Mapping[str, tuple[Sequence[Leg], Shard | None]]
"""By name, the legs of a tensor and what this rank has of it."""

Brought = Iterator[tuple[str, rv.Box, Tensor]]
"""The name of every result of this rank, its box in the tensor, and the shard."""


def move_many(transport: Transport, moves: Moves) -> Brought:
    """Move many shards, those of the same ranks in one call."""
    groups = _Groups(transport.rank, moves)
    yield from groups.staying
    for legs, pieces in groups.calls():
        yield from groups.brought(transport.move_many(legs, pieces))


def start_many(transport: Transport, moves: Moves) -> Callable[[], Brought]:
    """As ``move_many``, in the background; what is returned waits for it."""
    groups = _Groups(transport.rank, moves)
    handles = [transport.start_many(legs, pieces) for legs, pieces in groups.calls()]

    def wait() -> Brought:
        yield from groups.staying
        for handle in handles:
            yield from groups.brought(handle.wait())

    return wait


class _Groups:
    """What moves together, because the same ranks take part; ``staying`` is what is here."""

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
        """Legs and pieces of every call; all ranks meet their groups in one order."""
        for _, group in sorted(self._groups.items()):
            pieces = {key: piece for key, (_, _, piece) in group.items() if piece is not None}
            yield {key: leg for key, (_, leg, _) in group.items()}, pieces

    def brought(self, results: Mapping[str, Tensor | None]) -> Brought:
        """What a call has brought."""
        for key, result in results.items():
            name, leg, _ = self._entries[key]
            box = leg.dst_box(self._rank)
            if result is not None and box is not None:
                yield name, box, result


def _piece(rank: int, leg: Leg, shard: Shard | None) -> Tensor | None:
    """What a rank brings to a leg, cut out of its shard."""
    box = leg.src_box(rank)
    if shard is None or box is None:
        return None
    tensor, held = shard
    return tensor if box == held else tensor[box.slices_within(held)]
