"""Slabs: regions of a tensor in which every rank holds at most one box, under src and under dst.

Usually the only slab is the whole tensor. If a strided shard leaves gaps (a view that joined dims,
some uneven shard orders), the tensor is cut where the next run of a rank begins. Every slab is then
redistributed as a separate tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise, product

from rvdcomm.interop.dtensor.runs import Runs, length, within
from rvdcomm.interop.dtensor.sharding import DTensorSharding
from rvdcomm.layout import Box


def slabs_of(*shardings: DTensorSharding) -> list[Box]:
    """The fewest slabs, as a grid that tiles the tensor.

    Law (tests/interop/test_dtensor_slabs.py): the slabs tile the tensor, and every sharding is a
    layout on each of them.
    """
    shape = shardings[0].shape
    points = [
        _cut_points(size, [held for sharding in shardings for held in sharding.runs[d]])
        for d, size in enumerate(shape)
    ]
    grid = product(*(pairwise(cuts) for cuts in points))
    return [Box(tuple(a for a, _ in ranges), tuple(b for _, b in ranges)) for ranges in grid]


def slices_of(sharding: DTensorSharding, rank: int, slab: Box) -> tuple[slice, ...] | None:
    """Where a slab lies in the shard of ``rank``; None for a rank that is not in the mesh."""
    if rank not in sharding.ranks:
        return None
    slices = []
    for runs, lo, hi in zip(sharding.held(rank), slab.lo, slab.hi, strict=True):
        start = length(within(runs, 0, lo))
        slices.append(slice(start, start + length(within(runs, lo, hi))))
    return tuple(slices)


def _cut_points(size: int, holders: Sequence[Runs]) -> list[int]:
    points = [0]
    # Invariant: since the last point no holder has begun a second run.
    seen: set[int] = set()
    if any(len(runs) > 1 for runs in holders):
        for start in sorted({a for runs in holders for a, _ in runs}):
            begin = {i for i, runs in enumerate(holders) if any(a == start for a, _ in runs)}
            if begin & seen:
                points.append(start)
                seen = {i for i, runs in enumerate(holders) if any(a <= start < b for a, b in runs)}
            seen |= begin
    return [*points, size]
