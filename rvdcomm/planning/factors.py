"""Factors: the map from the cells of a layout to rank positions, as (size : stride) factors.

Two cases are computed without a loop over ranks. If the ranks of a layout are consecutive, the map
is row-major. If the groups of a topology are runs of ranks, each level cuts the numbering at one
stride. In all other cases the map is computed rank by rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from rvdcomm.layout import Layout
from rvdcomm.network import Topology

R, V = -1, -2
"""The mode of a factor is R, V, or the number of a dim."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A range of strides ``[lo, hi)`` whose axes count replicas, value parts or pieces of a dim.

    ``mode`` is R, V or the dim. For a dim, the factor cuts each of ``place`` coarser pieces.
    """

    mode: int
    lo: int
    hi: int
    place: int


@dataclass(frozen=True, slots=True)
class Numbering:
    """An order of ranks; ``span`` is ``ranks`` as a range, None if not known to be consecutive."""

    ranks: tuple[int, ...]
    span: range | None = None


def numberings(src: Layout, dst: Layout, topology: Topology) -> list[Numbering]:
    """Orders in which both layouts may factor, by host first; empty if the rank sets differ."""
    if src.span is not None and dst.span is not None and topology.runs is not None:
        return [Numbering(src.ranks, src.span)] if src.span == dst.span else []
    if set(src.ranks) != set(dst.ranks):
        return []
    by_host = tuple(sorted(src.ranks, key=topology.order.__getitem__))
    return [Numbering(ranks) for ranks in dict.fromkeys((by_host, src.ranks, dst.ranks))]


def level_blocks(numbering: Numbering, topology: Topology) -> tuple[int, ...] | None:
    """Ranks in a group of each level; None if the groups are not equal blocks of the numbering."""
    span = numbering.span
    if span is None or topology.runs is None:
        return _counted_blocks(numbering.ranks, topology)
    blocks = [run.block(span) for run in topology.runs]
    return None if None in blocks else tuple(block for block in blocks if block is not None)


def _counted_blocks(numbering: tuple[int, ...], topology: Topology) -> tuple[int, ...] | None:
    blocks = []
    for home in topology.homes:
        homes = np.array([home[rank] for rank in numbering])
        starts = np.flatnonzero(np.diff(homes)) + 1
        block = int(starts[0]) if len(starts) else len(numbering)
        if len(numbering) % block or len(starts) != len(numbering) // block - 1:
            return None
        if any(starts % block) or len(set(homes[::block].tolist())) != len(numbering) // block:
            return None
        blocks.append(block)
    return tuple(blocks)


def factors_of(layout: Layout, numbering: Numbering) -> list[Factor] | None:
    """The map from cells to positions as factors; None if the map does not factor.

    The map factors if it is a sum of one term per factor.
    """
    if numbering.span is not None and numbering.span == layout.span:
        return _row_major(layout)
    return _counted(layout, numbering.ranks)


def _row_major(layout: Layout) -> list[Factor]:
    """Factors of a layout whose cells are numbered in order."""
    factors, stride = [], 1
    for dim, count in reversed(list(enumerate(layout.rvd.counts))):
        if count > 1:
            factors.append(Factor(_mode(dim), stride, stride * count, place=1))
            stride *= count
    return factors


def _mode(dim: int) -> int:
    """The mode of an entry of ``RVD.counts``."""
    return {0: R, 1: V}.get(dim, dim - 2)


def _counted(layout: Layout, numbering: tuple[int, ...]) -> list[Factor] | None:
    position = {rank: i for i, rank in enumerate(numbering)}
    counts = layout.rvd.counts
    cells = np.array([position[rank] for rank in layout.ranks]).reshape(*counts[:2], -1)
    # Replicas are interchangeable, and so are parts. If any order factors, the sorted one does.
    cells.sort(axis=0)
    cells = np.take_along_axis(cells, np.argsort(cells[0], axis=0)[None], axis=1).reshape(counts)
    if cells.flat[0] != 0:
        return None
    additive = np.zeros(counts, dtype=cells.dtype)
    factors: list[Factor] = []
    for dim, count in enumerate(counts):
        offsets = cells[(0,) * dim + (slice(None),) + (0,) * (len(counts) - dim - 1)]
        run = _coalesced(offsets)
        if run is None:
            return None
        additive = additive + offsets.reshape(
            [count if i == dim else 1 for i in range(len(counts))]
        )
        place = count
        for size, stride in run:
            place //= size
            factors.append(Factor(_mode(dim), stride, stride * size, place))
    if not np.array_equal(additive, cells):
        return None
    bounds = sorted((factor.lo, factor.hi) for factor in factors)
    ends = [1, *(hi for _, hi in bounds)]
    is_tiled = all(lo == end for (lo, _), end in zip(bounds, ends, strict=False))
    return factors if is_tiled and ends[-1] == len(numbering) else None


def _coalesced(offsets: np.ndarray) -> list[tuple[int, int]] | None:
    """Factors (size, stride) of a map from an index to offsets, least significant first."""
    factors = []
    while len(offsets) > 1:
        stride = int(offsets[1])
        breaks = np.flatnonzero(offsets != np.arange(len(offsets)) * stride)
        size = int(breaks[0]) if len(breaks) else len(offsets)
        if stride <= 0 or len(offsets) % size:
            return None
        rows = offsets.reshape(-1, size)
        if not np.array_equal(rows, rows[:, :1] + np.arange(size) * stride):
            return None
        factors.append((size, stride))
        offsets = rows[:, 0]
    return factors


def is_chain(numbers: set[int]) -> bool:
    """Whether each of the numbers divides the next larger."""
    return all(outer % inner == 0 for inner, outer in pairwise(sorted(numbers)))
