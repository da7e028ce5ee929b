"""Regions: which boxes cover other boxes, and which boxes lie in one run of memory."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence

from rvdcomm.layout import Box
from rvdcomm.program.instructions import Buffer


class BoxIndex:
    """An index of boxes that finds those that meet another box without a scan.

    Law (tests/program/test_regions.py): ``meeting`` gives the result of a scan.
    """

    def __init__(self, boxes: Sequence[Box]) -> None:
        self.boxes = boxes
        num_dims = len(boxes[0].lo) if boxes else 0
        # The boxes are sorted along the dim with the most different lower bounds.
        begins = [{box.lo[d] for box in boxes} for d in range(num_dims)]
        self._dim = max(range(num_dims), key=lambda d: len(begins[d]), default=-1)
        if self._dim < 0 or len(boxes) <= 2:
            self._dim = -1
            return
        d = self._dim
        self._order = sorted(range(len(boxes)), key=lambda i: boxes[i].lo[d])
        self._lows = [boxes[i].lo[d] for i in self._order]
        self._longest = max(box.hi[d] - box.lo[d] for box in boxes)

    def meeting(self, box: Box) -> list[tuple[int, Box]]:
        """Index and common box of all boxes that meet ``box``, in their order."""
        near: Iterable[int] = range(len(self.boxes))
        if self._dim >= 0:
            first = bisect_right(self._lows, box.lo[self._dim] - self._longest)
            last = bisect_left(self._lows, box.hi[self._dim])
            near = sorted(self._order[first:last])
        found = ((i, self.boxes[i].intersect(box)) for i in near)
        return [(i, common) for i, common in found if common is not None]

    def uncovered(self, box: Box) -> list[Box]:
        """The part of ``box`` that no box of the index covers."""
        return uncovered([box], [common for _, common in self.meeting(box)])


def uncovered(boxes: Iterable[Box], by: Sequence[Box]) -> list[Box]:
    """The part of ``boxes`` that no box of ``by`` covers.

    >>> uncovered([Box((0,), (8,))], [Box((2,), (4,))])
    [Box(lo=(0,), hi=(2,)), Box(lo=(4,), hi=(8,))]
    """
    left = [box for box in boxes if not box.is_empty]
    for cover in by:
        left = [rest for box in left for rest in box.subtract(cover)]
    return left


def is_filled(boxes: Iterable[Box], by: Iterable[Box]) -> bool:
    """Whether disjoint boxes ``by``, all inside ``boxes``, cover them."""
    return sum(box.num_elements for box in by) == sum(box.num_elements for box in boxes)


def is_run(parts: Iterable[tuple[Buffer, int, Box] | None]) -> bool:
    """Whether boxes, each in a piece of a buffer, lie one after another in the same buffer.

    If ``parts`` has a None, the result is False. The iterable is read only as far as needed.
    """
    home: Buffer | None = None
    end = 0
    for part in parts:
        if part is None:
            return False
        buffer, piece, box = part
        outer = buffer.pieces[piece]
        inner = 0 if box == outer else box.flat_offset_within(outer)
        if inner is None:
            return False
        begin = buffer.offset(piece) + inner
        if home is not None and (buffer is not home or begin != end):
            return False
        home, end = buffer, begin + box.num_elements
    return True


def window(box: Box, index: int, count: int) -> Iterable[Box]:
    """The boxes of the ``index``-th of ``count`` equal runs of ``box`` in row-major order."""
    n = box.num_elements
    return box.flat_range(index * n // count, (index + 1) * n // count)
