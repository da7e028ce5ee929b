"""Arena: where the staging buffers of a rank lie in one block of memory.

Buffers that are never alive at once may share memory. Each buffer gets the lowest place that is
free in its lifetime (first fit), in the order of birth, or by descending size.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import accumulate
from math import isqrt
from typing import NamedTuple

ALIGN_BYTES = 64
"""Staging buffers start at multiples of a cache line, which suits every dtype and vector load."""

MAX_SORTED_BY_SIZE = 1024
"""With more staging buffers, the placement by size is skipped: it takes quadratic time."""


def aligned(num_bytes: int) -> int:
    """Round up to a multiple of ``ALIGN_BYTES``, an offset or size that suits every dtype."""
    return -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES


@dataclass(frozen=True, slots=True)
class Arena:
    """One block of memory for all staging buffers of a rank: byte offsets by buffer name."""

    offsets: dict[str, int]
    num_bytes: int

    @classmethod
    def of(cls, staged: Iterable[Staged]) -> Arena:
        """The arena of these buffers: those that are alive at once do not overlap.

        If first fit in the order of birth leaves holes, first fit by descending size is tried too,
        and the smaller arena is taken.
        """
        by_birth = sorted(staged)
        found = _by_birth(by_birth)
        if len(by_birth) <= MAX_SORTED_BY_SIZE and found.num_bytes > _most_alive(by_birth):
            again = _by_size(sorted(by_birth, key=lambda x: (-x.num_bytes, x)))
            found = min(found, again, key=lambda arena: arena.num_bytes)
        return found


class Staged(NamedTuple):
    """A staging buffer: the first and last instruction that uses it, its name and size."""

    first: int
    last: int
    name: str
    num_bytes: int


class FreeRanges:
    """The ranges of a block that are free; all begin and end at multiples of ``ALIGN_BYTES``.

    Ranges that touch are one. They are in bins, by the place of their start, and the largest of
    every bin is known. The bins are so many that ``take`` looks at few of them, and at few ranges.

    Law (tests/program/test_arena.py): ``take`` gives the lowest range that a scan finds.
    """

    def __init__(self, num_bytes: int, num_takes: int) -> None:
        self._num_bins = isqrt(num_takes) // 4 + 1
        self._bin_bytes = num_bytes // self._num_bins + 1
        self._bins: list[set[int]] = [set() for _ in range(self._num_bins)]
        self._largest = [0] * self._num_bins
        self._end: dict[int, int] = {}
        self._start: dict[int, int] = {}
        self._add(0, num_bytes)

    def take(self, num_bytes: int) -> int:
        """Take the lowest free range of this size; returns its start."""
        number = next(i for i, largest in enumerate(self._largest) if largest >= num_bytes)
        start = min(at for at in self._bins[number] if self._end[at] - at >= num_bytes)
        end = self._end[start]
        self._remove(start)
        if start + num_bytes < end:
            self._add(start + num_bytes, end)
        return start

    def free(self, start: int, end: int) -> None:
        """Give a range back."""
        if start in self._start:
            start = self._start[start]
            self._remove(start)
        if end in self._end:
            after = self._end[end]
            self._remove(end)
            end = after
        self._add(start, end)

    def _add(self, start: int, end: int) -> None:
        if start < end:
            self._end[start], self._start[end] = end, start
            number = start // self._bin_bytes
            self._bins[number].add(start)
            self._largest[number] = max(self._largest[number], end - start)

    def _remove(self, start: int) -> None:
        end = self._end.pop(start)
        del self._start[end]
        number = start // self._bin_bytes
        starts = self._bins[number]
        starts.remove(start)
        if self._largest[number] == end - start:
            self._largest[number] = max((self._end[at] - at for at in starts), default=0)


def _by_birth(staged: Sequence[Staged]) -> Arena:
    """First fit of buffers that ascend by birth: those that have died before make room."""
    sizes = [aligned(each.num_bytes) for each in staged]
    free = FreeRanges(sum(sizes), len(staged))
    alive: list[tuple[int, int, int]] = []
    offsets = {}
    num_bytes = 0
    for each, size in zip(staged, sizes, strict=True):
        while alive and alive[0][0] < each.first:
            _, start, end = heappop(alive)
            free.free(start, end)
        start = offsets[each.name] = free.take(size) if size else 0
        if size:
            heappush(alive, (each.last, start, start + size))
        num_bytes = max(num_bytes, start + each.num_bytes)
    return Arena(offsets, num_bytes)


def _by_size(staged: Sequence[Staged]) -> Arena:
    """First fit of buffers in any order: a place is free if no buffer there is alive meanwhile."""
    placed: list[tuple[int, int, Staged]] = []
    offsets = {}
    num_bytes = 0
    for mine in staged:
        start = 0
        for low, end, other in placed:
            is_alive = other.first <= mine.last and mine.first <= other.last
            if is_alive and low < start + mine.num_bytes and start < end:
                start = aligned(end)
        offsets[mine.name] = start
        insort(placed, (start, start + mine.num_bytes, mine))
        num_bytes = max(num_bytes, start + mine.num_bytes)
    return Arena(offsets, num_bytes)


def _most_alive(staged: Sequence[Staged]) -> int:
    """The most bytes of aligned buffers that are alive at once; a larger arena has holes."""
    changes = [(each.first, aligned(each.num_bytes)) for each in staged]
    changes += [(each.last + 1, -aligned(each.num_bytes)) for each in staged]
    return max(accumulate((change for _, change in sorted(changes)), initial=0))
