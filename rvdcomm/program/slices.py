"""Slices: cut the tensor so that every step of a path treats each slice on its own.

Slice i of k is the i-th slab of every *finest* box. The cut points of all states of the path bound
the finest boxes, so no move cuts them. Every move of every step is therefore cut into equal parts,
one per slice, and the slices can be pipelined through the steps.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from itertools import pairwise, product
from math import prod

from rvdcomm.layout import Box, Cuts, merged
from rvdcomm.planning.cells import Cells
from rvdcomm.planning.path import Path

MAX_FINEST_BOXES = 4096
"""A path with more finest boxes is not sliced: the boxes are small, and their slabs too many."""


@dataclass(frozen=True)
class Slicing:
    """``num_slices`` slices of a tensor; ``cuts`` are the bounds of the finest boxes.

    Law (tests/program/test_slices.py): the slices of a box tile it.
    """

    cuts: Cuts
    num_slices: int

    @classmethod
    def of(cls, boxes: Iterable[Box], num_slices: int) -> Slicing:
        """Slices of a path with these boxes; one slice if they have too many finest boxes."""
        boxes = set(boxes)
        if num_slices == 1 or not any(box.shape for box in boxes):
            return cls((), 1)
        num_dims = len(next(iter(boxes)).lo)
        cuts = tuple(
            tuple(sorted({bound for box in boxes for bound in (box.lo[d], box.hi[d])}))
            for d in range(num_dims)
        )
        num_finest = prod(len(cut) - 1 for cut in cuts)
        return cls(cuts, num_slices) if num_finest <= MAX_FINEST_BOXES else cls((), 1)

    @cached_property
    def largest_share(self) -> Fraction:
        """The largest share that a slice has of a finest box."""
        extents = [{high - low for low, high in pairwise(cut) if low < high} for cut in self.cuts]
        shares = (_slab_share(shape, self.num_slices) for shape in product(*extents))
        return max(shares, default=Fraction(1)) if self.num_slices > 1 else Fraction(1)

    def of_box(self, box: Box, index: int) -> tuple[Box, ...]:
        """Slice ``index`` of ``box``."""
        if self.num_slices == 1 or box.is_empty:
            return (box,)
        # Replicas hold equal boxes, and a box is sliced both before and after it moves.
        if (box, index) not in self._known:
            self._known[box, index] = self._of_box(box, index)
        return self._known[box, index]

    @cached_property
    def _known(self) -> dict[tuple[Box, int], tuple[Box, ...]]:
        return {}

    def _of_box(self, box: Box, index: int) -> tuple[Box, ...]:
        intervals = []
        for cut, low, high in zip(self.cuts, box.lo, box.hi, strict=True):
            around = cut[bisect_right(cut, low) - 1 : bisect_left(cut, high) + 1]
            intervals.append(list(pairwise(around)))
        finest = (Box(*zip(*chosen, strict=True)) for chosen in product(*intervals))
        found = (_slab(cell, index, self.num_slices).intersect(box) for cell in finest)
        return merged(part for part in found if part is not None)

    def of_boxes(self, boxes: Iterable[Box], index: int) -> tuple[Box, ...]:
        """Slice ``index`` of disjoint boxes."""
        return tuple(part for box in boxes for part in self.of_box(box, index))


def slicing_of(path: Path, num_slices: int) -> Slicing:
    """Slices of the tensor in which every box of every state of a path is cut equally."""
    if num_slices == 1:
        return Slicing((), 1)
    boxes: set[Box] = set()
    for state in {
        id(s): s
        for step in path.steps
        for step_exchange in step.step_exchanges
        for s in step_exchange
    }.values():
        cells = Cells(state.source, view=path.view)
        if cells.num_keys > MAX_FINEST_BOXES:
            return Slicing((), 1)
        boxes.update(box for key in cells.all_keys() for box in cells.boxes(key))
    return Slicing.of(boxes, num_slices)


def _slab(box: Box, index: int, count: int) -> Box:
    """The ``index``-th of ``count`` slabs of ``box`` along ``_sliced_dim``."""
    d = _sliced_dim(box.shape, count)
    low, extent = box.lo[d], box.shape[d]
    lo, hi = list(box.lo), list(box.hi)
    lo[d], hi[d] = low + index * extent // count, low + (index + 1) * extent // count
    return Box(tuple(lo), tuple(hi))


def _sliced_dim(shape: Sequence[int], count: int) -> int:
    """The first dim with at least ``count`` elements, or else the longest."""
    long = [d for d, extent in enumerate(shape) if extent >= count]
    return long[0] if long else shape.index(max(shape))


def _slab_share(shape: Sequence[int], count: int) -> Fraction:
    """The share of a box of this shape that its largest slab has."""
    extent = shape[_sliced_dim(shape, count)]
    return Fraction(-(-extent // count), extent)
