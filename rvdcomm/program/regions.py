"""Geometry of box lists: what covers what, and what lies in one run of memory."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rvdcomm.layout import Box


def uncovered(boxes: Iterable[Box], by: Sequence[Box]) -> list[Box]:
    """What of ``boxes`` no box of ``by`` covers.

    >>> uncovered([Box((0,), (8,))], [Box((2,), (4,))])
    [Box(lo=(0,), hi=(2,)), Box(lo=(4,), hi=(8,))]
    """
    left = [box for box in boxes if not box.is_empty]
    for cover in by:
        left = [rest for box in left for rest in box.subtract(cover)]
    return left


def is_filled(boxes: Iterable[Box], by: Iterable[Box]) -> bool:
    """Whether disjoint boxes ``by``, all inside ``boxes``, leave no hole in them."""
    return sum(box.num_elements for box in by) == sum(box.num_elements for box in boxes)


def pieces_of(pieces: Sequence[Box], box: Box) -> list[tuple[int, Box]]:
    """The parts of ``box`` in each of ``pieces``, with the piece's index."""
    found = [(i, piece.intersect(box)) for i, piece in enumerate(pieces)]
    return [(i, common) for i, common in found if common is not None]


def is_run(pieces: Sequence[Box], parts: Iterable[tuple[int, Box]]) -> bool:
    """Whether boxes, each in a piece, lie one after another in the memory of ``pieces``."""
    offsets = [0]
    for piece in pieces:
        offsets.append(offsets[-1] + piece.num_elements)
    end: int | None = None
    for i, box in parts:
        inner = box.flat_offset_within(pieces[i])
        if inner is None or (end is not None and offsets[i] + inner != end):
            return False
        end = offsets[i] + inner + box.num_elements
    return True


def window(box: Box, index: int, count: int) -> Iterable[Box]:
    """The boxes of the ``index``-th of ``count`` equal runs of ``box``."""
    n = box.num_elements
    return box.flat_range(index * n // count, (index + 1) * n // count)
