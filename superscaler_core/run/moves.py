"""Moves: moves many shards at the same time, with one call per group of ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import Leg
from superscaler_core.run.transport import Transport

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
