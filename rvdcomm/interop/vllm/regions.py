"""Regions: what ranks need of a tensor, boxes of any kind, as layouts of parts of the tensor.

A layout is a grid of boxes that cover a tensor, each on equally many ranks. What the workers of an
engine need is mostly that: a weight cut by rows or columns, key heads that two workers share each.
Else the tensor is divided in regions, each of which is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise, product
from math import prod

from rvdcomm import RVD, Box, Layout
from rvdcomm.layout import merged

Region = tuple[Box, Layout]
"""A box of a tensor, and its layout as a tensor of its own."""


def joined(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Boxes that do not overlap, such that each of the given ones lies in one of them.

    >>> joined([Box((0,), (4,)), Box((2,), (6,)), Box((8,), (9,))])
    (Box(lo=(0,), hi=(6,)), Box(lo=(8,), hi=(9,)))
    """
    found: list[Box] = []
    for box in merged(set(boxes)):
        # A box that grew may overlap others that it did not before.
        while over := [known for known in found if known.overlaps(box)]:
            found = [known for known in found if known not in over]
            box = _hull([box, *over])
        found.append(box)
    return merged(found)


def _hull(boxes: Sequence[Box]) -> Box:
    low = (min(bounds) for bounds in zip(*(box.lo for box in boxes), strict=True))
    high = (max(bounds) for bounds in zip(*(box.hi for box in boxes), strict=True))
    return Box(tuple(low), tuple(high))


def regions_of(boxes: Mapping[int, Sequence[Box]]) -> list[Region]:
    """The regions of a tensor, given the disjoint boxes that each rank needs.

    Law (tests/interop/vllm/test_regions.py): the cells that the layouts give a rank tile its boxes,
    and each cell lies in one of them.
    """
    needed = {rank: [box for box in held if not box.is_empty] for rank, held in boxes.items()}
    needed = {rank: held for rank, held in needed.items() if held}
    lengths = {len(held) for held in needed.values()}
    # Ranks that need several boxes each, as the halves of a fused weight, need them in one order.
    if len(lengths) == 1:
        turns = [{rank: held[i] for rank, held in needed.items()} for i in range(lengths.pop())]
        grids = [_grid(turn) for turn in turns]
        if all(grids) and _are_apart([grid[0] for grid in grids if grid]):
            return [grid for grid in grids if grid]
    return list(_pieces(needed))


def cropped(layout: Layout, box: Box) -> Layout:
    """The layout of a box of a tensor, as a tensor of its own: each rank has what it has of it."""
    cuts = [
        tuple(min(max(point, low), high) - low for point in cut)
        for cut, low, high in zip(layout.cuts, box.lo, box.hi, strict=True)
    ]
    return Layout(box.shape, layout.rvd, layout.ranks, cuts)


def _grid(box_of: Mapping[int, Box]) -> Region | None:
    """The boxes of ranks as one layout, if they are a grid with equally many ranks for each."""
    holders: dict[Box, list[int]] = {}
    for rank, box in sorted(box_of.items()):
        holders.setdefault(box, []).append(rank)
    bounds = [
        sorted({box.lo[d] for box in holders} | {box.hi[d] for box in holders})
        for d in range(len(next(iter(holders)).lo))
    ]
    counts = tuple(len(cut) - 1 for cut in bounds)
    cells = [_box(ranges) for ranges in product(*map(pairwise, bounds))]
    replicas = {len(ranks) for ranks in holders.values()}
    if prod(counts) != len(holders) or len(replicas) > 1 or any(c not in holders for c in cells):
        return None
    low = tuple(cut[0] for cut in bounds)
    whole = Box(low, tuple(cut[-1] for cut in bounds))
    cuts = [tuple(point - base for point in cut) for cut, base in zip(bounds, low, strict=True)]
    (r,) = replicas
    ranks = [holders[cell][i] for i in range(r) for cell in cells]
    return whole, Layout(whole.shape, RVD(r, 1, counts), ranks, cuts)


def _are_apart(boxes: Sequence[Box]) -> bool:
    return not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def _pieces(needed: Mapping[int, Sequence[Box]]) -> Iterator[Region]:
    """Boxes that each have the same ranks everywhere, one region each."""
    every = [box for held in needed.values() for box in held]
    if not every:
        return
    bounds = [
        sorted({box.lo[d] for box in every} | {box.hi[d] for box in every})
        for d in range(len(every[0].lo))
    ]
    holders: dict[tuple[int, ...], list[Box]] = {}
    for ranges in product(*map(pairwise, bounds)):
        cell = _box(ranges)
        ranks = tuple(
            rank for rank, held in sorted(needed.items()) if any(b.contains(cell) for b in held)
        )
        if ranks:
            holders.setdefault(ranks, []).append(cell)
    for ranks, cells in holders.items():
        # Cells of one box of a rank may lie beside those of another: such ones stay apart.
        for box in _within(cells, [needed[rank] for rank in ranks]):
            yield box, Layout(box.shape, RVD(len(ranks), 1, (1,) * len(box.lo)), ranks)


def _within(cells: Sequence[Box], held: Sequence[Sequence[Box]]) -> Iterator[Box]:
    """The cells joined to larger boxes, each in one box of every rank."""
    homes: dict[tuple[int, ...], list[Box]] = {}
    for cell in cells:
        home = tuple(next(i for i, b in enumerate(of) if b.contains(cell)) for of in held)
        homes.setdefault(home, []).append(cell)
    for each in homes.values():
        yield from merged(each)


def _box(ranges: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(low for low, _ in ranges), tuple(high for _, high in ranges))
