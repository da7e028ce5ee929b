"""Runs: which indices of one tensor dim a rank holds, after mesh dims have cut it in turn.

``Shard`` cuts the indices of the mesh dims before it as ``torch.chunk`` does. A strided shard first
cuts them into ``split_factor`` blocks, chunks every block, and holds one chunk of each. A rank
therefore holds a list of runs in ascending order: one run, unless a strided shard leaves gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from rvdcomm.layout import chunk_cuts

IndexRange = tuple[int, int]
"""Half-open range of indices, never empty."""

Runs = tuple[IndexRange, ...]
"""Index ranges, ascending and not adjacent; empty if the rank holds nothing."""

Cutter = tuple[int, int]
"""How one mesh dim cuts: (number of pieces, split factor); the factor is 1 for ``Shard``."""


def nested_runs(size: int, cutters: Sequence[Cutter]) -> list[Runs]:
    """The runs of a dim of ``size`` that each coordinate holds, row-major over the mesh dims.

    Law (tests/interop/test_dtensor_layouts.py): the offset of the first run, and the length of all
    runs, are what ``compute_local_shape_and_global_offset`` says.

    >>> nested_runs(9, [(2, 1), (2, 1)])
    [((0, 3),), ((3, 5),), ((5, 7),), ((7, 9),)]
    >>> nested_runs(8, [(2, 2)])
    [((0, 2), (4, 6)), ((2, 4), (6, 8))]
    """
    held: list[Runs] = [((0, size),) if size else ()]
    for count, split_factor in cutters:
        held = [piece for runs in held for piece in _cut(runs, count, split_factor)]
    return held


def length(runs: Runs) -> int:
    """Number of indices in ``runs``."""
    return sum(stop - start for start, stop in runs)


def within(runs: Runs, start: int, stop: int) -> Runs:
    """The part of ``runs`` in a range of indices."""
    clipped = ((max(a, start), min(b, stop)) for a, b in runs)
    return tuple((a, b) for a, b in clipped if a < b)


def _cut(runs: Runs, count: int, split_factor: int) -> Iterator[Runs]:
    blocks = [*pairwise(chunk_cuts(length(runs), split_factor))]
    for i in range(count):
        chunks: list[IndexRange] = []
        for start, stop in blocks:
            cuts = chunk_cuts(stop - start, count)
            chunks += _slice(runs, start + cuts[i], start + cuts[i + 1])
        yield _joined(chunks)


def _slice(runs: Runs, start: int, stop: int) -> Iterator[IndexRange]:
    """The ``start``-th to ``stop``-th index in ``runs``, as ranges."""
    passed = 0
    for a, b in runs:
        low, high = max(start - passed, 0), min(stop - passed, b - a)
        if low < high:
            yield a + low, a + high
        passed += b - a


def _joined(runs: Sequence[IndexRange]) -> Runs:
    """The same indices, with adjacent runs joined."""
    out: list[IndexRange] = []
    for start, stop in runs:
        if out and out[-1][1] == start:
            out[-1] = (out[-1][0], stop)
        else:
            out.append((start, stop))
    return tuple(out)
