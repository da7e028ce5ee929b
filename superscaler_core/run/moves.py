"""Moves: a shard's way along the legs of an edge, which may take a region each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import Leg
from superscaler_core.run.transport import Transport

Shard = tuple[Tensor, rv.Box]
"""What a rank holds of a tensor, and which box of it that is."""

Wait = Callable[[], Tensor | None]


def move(
    transport: Transport, legs: Sequence[Leg], shard: Shard | None, dst: rv.Box | None
) -> Tensor | None:
    """Move a shard along all legs; this rank's shard ``dst``, or None if it gets none."""
    pieces = [_piece(transport.rank, leg, shard) for leg in legs]
    results = [
        piece if leg.is_idle else transport.move(leg, piece)
        for leg, piece in zip(legs, pieces, strict=True)
    ]
    return _assembled(transport.rank, legs, results, dst)


def start(
    transport: Transport, legs: Sequence[Leg], shard: Shard | None, dst: rv.Box | None
) -> Wait:
    """As ``move``, in the background; what is returned waits for it."""
    waits: list[Wait] = []
    for leg in legs:
        piece = _piece(transport.rank, leg, shard)
        waits.append(_given(piece) if leg.is_idle else transport.start(leg, piece).wait)
    return lambda: _assembled(transport.rank, legs, [wait() for wait in waits], dst)


def move_many(
    transport: Transport, moves: Mapping[str, tuple[Sequence[Leg], Shard | None]]
) -> Iterator[tuple[str, rv.Box, Tensor]]:
    """Move many shards, those of the same ranks in one call.

    Yields:
        The name of every result of this rank, its box in the tensor, and the shard.
    """
    groups: dict[tuple[int, ...], dict[str, tuple[str, Leg, Tensor | None]]] = {}
    for name, (legs, shard) in moves.items():
        for leg in legs:
            piece = _piece(transport.rank, leg, shard)
            box = leg.dst_box(transport.rank)
            if not leg.is_idle:
                groups.setdefault(leg.ranks, {})[name + leg.box] = name, leg, piece
            elif piece is not None and box is not None:
                yield name, box, piece
    # Every rank meets its groups in one order, so none waits for what comes later.
    for _, entries in sorted(groups.items()):
        results = transport.move_many(
            {key: leg for key, (_, leg, _) in entries.items()},
            {key: piece for key, (_, _, piece) in entries.items() if piece is not None},
        )
        for key, result in results.items():
            name, leg, _ = entries[key]
            box = leg.dst_box(transport.rank)
            if result is not None and box is not None:
                yield name, box, result


def _given(piece: Tensor | None) -> Wait:
    return lambda: piece


def _piece(rank: int, leg: Leg, shard: Shard | None) -> Tensor | None:
    """What a rank brings to a leg, cut out of its shard."""
    box = leg.src_box(rank)
    if shard is None or box is None:
        return None
    tensor, held = shard
    return tensor if box == held else tensor[box.slices_within(held)]


def _assembled(
    rank: int, legs: Sequence[Leg], results: Sequence[Tensor | None], dst: rv.Box | None
) -> Tensor | None:
    """This rank's shard, put together from what legs brought."""
    if dst is None:
        return None
    found = [
        (box, result)
        for leg, result in zip(legs, results, strict=True)
        if result is not None and (box := leg.dst_box(rank)) is not None
    ]
    if len(found) == 1 and found[0][0] == dst:
        return found[0][1]
    assert found, "a leg brings every reader what it reads"
    shard = torch.zeros(dst.shape, dtype=found[0][1].dtype, device=found[0][1].device)
    for box, result in found:
        shard[box.slices_within(dst)] = result
    return shard
