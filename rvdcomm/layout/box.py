"""Boxes: half-open regions of a tensor, and the few set operations that planning needs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from math import prod
from operator import sub
from typing import NamedTuple

from rvdcomm.errors import LayoutError
from rvdcomm.text import MAX_DIGITS, MAX_INTEGER, quoted

MAX_DIMS = 63
"""Numpy arrays have at most 64 dims; the verifier uses one of them for the value parts."""

_RANGE = f"[0-9]{{1,{MAX_DIGITS}}}:[0-9]{{1,{MAX_DIGITS}}}"
_FORM = re.compile(rf"\[(?:{_RANGE}(?:,{_RANGE}){{0,{MAX_DIMS - 1}}})?\]")


class Box(NamedTuple):
    """The half-open region ``[lo, hi)`` of a tensor, in elements; ``()`` and ``()`` for a scalar.

    Laws (tests/layout/test_box.py): ``Box.parse(str(x)) == x``; ``intersect`` is the set
    intersection; the boxes of ``flat_range(0, k)`` and ``flat_range(k, n)`` tile the box.

    >>> Box((0, 4), (2, 8)).intersect(Box((1, 0), (3, 6)))
    Box(lo=(1, 4), hi=(2, 6))
    """

    lo: tuple[int, ...]
    hi: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent along every dim, in elements."""
        return tuple(map(sub, self.hi, self.lo))

    @property
    def num_elements(self) -> int:
        """Number of elements; 1 for a scalar, 0 for an empty box."""
        count = 1
        for low, high in zip(self.lo, self.hi, strict=True):
            count *= high - low
        return count

    @property
    def is_empty(self) -> bool:
        """Whether the box holds no element."""
        return any(h <= low for low, h in zip(self.lo, self.hi, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None where there is none."""
        # This is the inner loop of lowering: plain loops are the fastest here.
        lo, hi = [], []
        for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True):
            low = a if a > c else c
            high = b if b < d else d
            if low >= high:
                return None
            lo.append(low)
            hi.append(high)
        return Box(tuple(lo), tuple(hi))

    def overlaps(self, other: Box) -> bool:
        """Whether the two boxes have at least one element in common."""
        for a, b, c, d in zip(self.lo, self.hi, other.lo, other.hi, strict=True):
            if a >= d or c >= b or a >= b or c >= d:
                return False
        return True

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` is in this box."""
        return all(a <= b for a, b in zip(self.lo, other.lo, strict=True)) and all(
            a >= b for a, b in zip(self.hi, other.hi, strict=True)
        )

    def slices_within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in an array that holds ``outer``."""
        return tuple(
            slice(low - base, high - base)
            for low, high, base in zip(self.lo, self.hi, outer.lo, strict=True)
        )

    def subtract(self, other: Box) -> Iterator[Box]:
        """Yield disjoint boxes that cover this box without ``other``."""
        common = self.intersect(other)
        if common is None:
            yield self
            return
        lo, hi = list(self.lo), list(self.hi)
        # [lo, hi) is `common` and the part not yet yielded; each dim yields slabs outside `common`.
        for d in range(len(lo)):
            if lo[d] < common.lo[d]:
                yield Box(tuple(lo), (*hi[:d], common.lo[d], *hi[d + 1 :]))
            if common.hi[d] < hi[d]:
                yield Box((*lo[:d], common.hi[d], *lo[d + 1 :]), tuple(hi))
            lo[d], hi[d] = common.lo[d], common.hi[d]

    def flat_range(self, start: int, stop: int) -> Iterator[Box]:
        """Yield boxes that hold elements ``start`` to ``stop`` (exclusive) in row-major order."""
        yield from _flat_range(self, 0, start, stop)

    def flat_offset_within(self, outer: Box) -> int | None:
        """Row-major offset in ``outer`` if this box is one contiguous run there, else None."""
        offset, is_run = 0, True
        inner_is_whole = True
        # Scanned from the innermost dim: once a dim is cut, every outer dim must have extent 1.
        stride = 1
        for d in reversed(range(len(self.lo))):
            extent = self.hi[d] - self.lo[d]
            outer_extent = outer.hi[d] - outer.lo[d]
            if not inner_is_whole and extent != 1:
                is_run = False
            if extent != outer_extent:
                inner_is_whole = False
            offset += (self.lo[d] - outer.lo[d]) * stride
            stride *= outer_extent
        return offset if is_run else None

    def __str__(self) -> str:
        ranges = (f"{low}:{high}" for low, high in zip(self.lo, self.hi, strict=True))
        return "[" + ",".join(ranges) + "]"

    @classmethod
    def parse(cls, text: str) -> Box:
        """Read the text that ``str`` writes, such as ``[0:4,2:8]``."""
        if _FORM.fullmatch(text) is None:
            raise LayoutError(f"cannot parse box {quoted(text)}: expected the form '[0:4,2:8]'.")
        bounds = list(map(int, re.findall("[0-9]+", text)))
        box = cls(tuple(bounds[::2]), tuple(bounds[1::2]))
        if max(bounds, default=0) > MAX_INTEGER:
            raise LayoutError(f"cannot parse box {quoted(text)}: it goes beyond {MAX_INTEGER}.")
        if any(low > h for low, h in zip(box.lo, box.hi, strict=True)):
            raise LayoutError(f"cannot parse box {quoted(text)}: a range ends before it starts.")
        return box

    @classmethod
    def of_shape(cls, shape: Iterable[int]) -> Box:
        """The box of a whole tensor."""
        shape = tuple(shape)
        return cls((0,) * len(shape), shape)


def _flat_range(box: Box, dim: int, start: int, stop: int) -> Iterator[Box]:
    """Do the work of ``Box.flat_range`` for a box whose dims before ``dim`` have extent 1."""
    if start >= stop:
        return
    if start == 0 and stop == box.num_elements:
        yield box
        return
    row = prod(box.shape[dim + 1 :])
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)

    def rows(a: int, b: int) -> Box:
        base = box.lo[dim]
        lo = (*box.lo[:dim], base + a, *box.lo[dim + 1 :])
        return Box(lo, (*box.hi[:dim], base + b, *box.hi[dim + 1 :]))

    if first == last:
        yield from _flat_range(rows(first, first + 1), dim + 1, head, tail)
        return
    if head:
        yield from _flat_range(rows(first, first + 1), dim + 1, head, row)
        first += 1
    if first < last:
        yield rows(first, last)
    if tail:
        yield from _flat_range(rows(last, last + 1), dim + 1, 0, tail)


def merged(boxes: Iterable[Box]) -> tuple[Box, ...]:
    """Join boxes that abut along one dim, innermost dim first; the result is sorted.

    The result does not depend on the order of ``boxes``.

    >>> merged([Box((0, 2), (4, 4)), Box((0, 0), (4, 2))])
    (Box(lo=(0, 0), hi=(4, 4)),)
    """
    todo = sorted(box for box in boxes if not box.is_empty)
    if len(todo) < 2:
        return tuple(todo)
    for d in reversed(range(len(todo[0].lo))):
        # Boxes that agree outside dim d lie in one bucket, ordered along d.
        buckets: dict[tuple[tuple[int, ...], ...], list[Box]] = {}
        for box in todo:
            key = (box.lo[:d], box.lo[d + 1 :], box.hi[:d], box.hi[d + 1 :])
            run = buckets.setdefault(key, [])
            if run and run[-1].hi[d] == box.lo[d]:
                run[-1] = Box(run[-1].lo, box.hi)
            else:
                run.append(box)
        todo = sorted(box for run in buckets.values() for box in run)
    return tuple(todo)
