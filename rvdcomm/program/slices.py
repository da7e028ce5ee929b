"""Slices: cut the tensor so that every step of a path does the same to each slice on its own.

Slice i of k is the i-th window of every *finest* box: of the boxes that no move of the path cuts.
Then every move of every step is an equal part in every slice, whatever the steps are, and the
slices can follow one another through the steps like cars through a car wash.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from math import prod

from rvdcomm.layout import Box, Cuts, merged
from rvdcomm.program.instructions import Instruction

MAX_FINEST_BOXES = 4096
"""A path with more is not sliced: its boxes are small already, and there would be too many."""


@dataclass(frozen=True)
class Slicing:
    """``num_slices`` slices of a tensor; ``cuts`` are the bounds of the finest boxes.

    Law (tests/program/test_slices.py): the slices of a box tile it, if the cuts hold its bounds.
    """

    cuts: Cuts
    num_slices: int

    @classmethod
    def of(cls, boxes: Iterable[Box], num_slices: int) -> Slicing:
        """Slices that suit these boxes; a single one if they are too many."""
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

    def of_box(self, box: Box, index: int) -> tuple[Box, ...]:
        """Slice ``index`` of ``box``."""
        if self.num_slices == 1 or box.is_empty:
            return (box,)
        intervals = []
        for cut, low, high in zip(self.cuts, box.lo, box.hi, strict=True):
            inside = cut[bisect_left(cut, low) : bisect_left(cut, high) + 1]
            intervals.append(list(pairwise(inside)))
        finest = (Box(*zip(*chosen, strict=True)) for chosen in product(*intervals))
        return merged(_window(cell, index, self.num_slices) for cell in finest)

    def of_boxes(self, boxes: Iterable[Box], index: int) -> tuple[Box, ...]:
        """Slice ``index`` of disjoint boxes."""
        return tuple(part for box in boxes for part in self.of_box(box, index))


def _window(box: Box, index: int, count: int) -> Box:
    """The ``index``-th of ``count`` slabs of ``box`` across the first dim that has so many."""
    long = [d for d, extent in enumerate(box.shape) if extent >= count]
    d = long[0] if long else box.shape.index(max(box.shape))
    low, extent = box.lo[d], box.shape[d]
    lo, hi = list(box.lo), list(box.hi)
    lo[d], hi[d] = low + index * extent // count, low + (index + 1) * extent // count
    return Box(tuple(lo), tuple(hi))


def interleaved(lanes: Sequence[Sequence[Sequence[Instruction]]]) -> list[Instruction]:
    """Instructions of all slices' phases, each slice one phase behind the one before it.

    Within a beat the slices that are least far go first: they start transfers, which then overlap
    with what the others do to what has arrived.
    """
    num_beats = max(len(lane) for lane in lanes) + len(lanes) - 1
    return [
        instruction
        for beat in range(num_beats)
        for index in reversed(range(len(lanes)))
        if 0 <= beat - index < len(lanes[index])
        for instruction in lanes[index][beat - index]
    ]
