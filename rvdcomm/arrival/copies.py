"""Copies: which ranks hold values that another rank owns, and in which boxes.

The lowest holder of a cell of src owns its values. All others have copies: the other replicas of
that cell, and every rank that has an element of it in dst. The owner and the holder of a copy
compute digests of the same boxes, so these can be compared.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from rvdcomm.layout import Box, Layout


class Copy(NamedTuple):
    """The shard of one rank, of values that other ranks own: a dst shard, or a replica in src.

    >>> str(Copy(is_src=False, rank=3))
    'dst 3'
    """

    is_src: bool
    rank: int

    def __str__(self) -> str:
        return f"{'src' if self.is_src else 'dst'} {self.rank}"

    @classmethod
    def parse(cls, text: str) -> Copy:
        """Read the text that ``str`` writes."""
        side, _, rank = text.partition(" ")
        return cls(side == "src", int(rank))


@lru_cache(maxsize=1 << 12)
def parts_owned(src: Layout, dst: Layout, rank: int) -> tuple[tuple[Box, tuple[Copy, ...]], ...]:
    """The boxes whose values ``rank`` owns, each with all copies of it; layouts have V(1).

    Law (tests/arrival/test_copies.py): the boxes of all ranks that have a copy in them tile the
    shard of that copy.

    >>> src, dst = Layout((4,), "R(2)V(1)D(1)"), Layout((4,), "R(1)V(1)D(2)")
    >>> [(str(box), *map(str, copies)) for box, copies in parts_owned(src, dst, 0)]
    [('[0:2]', 'src 1', 'dst 0'), ('[2:4]', 'src 1', 'dst 1')]
    """
    if rank not in src or src.cell(rank).replica:
        return ()
    box = src.cell(rank).box
    cell = src.position(rank) % prod(src.rvd.d)
    replicas = tuple(Copy(True, other) for other in _holders(src, cell)[1:])
    return tuple(
        (part, replicas + tuple(Copy(False, other) for other in _holders(dst, number)))
        for number, part in _pieces(dst, box)
    )


@lru_cache(maxsize=1 << 12)
def copies_held(src: Layout, dst: Layout, rank: int) -> tuple[tuple[Copy, Box], ...]:
    """The copies that ``rank`` holds, with the boxes of their shards; empty shards are none."""
    held = []
    if rank in src and src.cell(rank).replica:
        held.append((Copy(True, rank), src.cell(rank).box))
    if rank in dst:
        held.append((Copy(False, rank), dst.cell(rank).box))
    return tuple((copy, box) for copy, box in held if not box.is_empty)


def _holders(layout: Layout, number: int) -> tuple[int, ...]:
    """The ranks of all replicas of box ``number``, in row-major order of boxes; ascending."""
    return layout.ranks[number :: prod(layout.rvd.d)]


def _pieces(layout: Layout, box: Box) -> Iterator[tuple[int, Box]]:
    """The number and the part of every box of ``layout`` that has elements of ``box``."""
    ranges = [
        _cut_range(cut, low, high)
        for cut, low, high in zip(layout.cuts, box.lo, box.hi, strict=True)
    ]
    for index in product(*ranges):
        part = layout.box(index).intersect(box)
        if part is not None:
            number = 0
            for i, count in zip(index, layout.rvd.d, strict=True):
                number = number * count + i
            yield number, part


def _cut_range(cut: tuple[int, ...], low: int, high: int) -> range:
    """The pieces between cut points that may have elements from ``low`` to ``high`` (exclusive)."""
    if low >= high:
        return range(0)
    return range(bisect_right(cut, low) - 1, bisect_right(cut, high - 1))
