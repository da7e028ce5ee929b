"""Relabel: choose which rank holds which dst cell, where the caller leaves the order of ranks open.

A *group* of a topology level (a rank, a host, a rack) *has* an element if one of its src ranks
holds the element. If src has value parts, the group must hold all of them; if no group holds all
parts of an element, any part counts. An element enters a group once, even if several of its ranks
want it. The chosen order minimizes the bytes into the outermost groups first, then those into the
groups inside them, down to the ranks (docs/relabelling.md).

If every dst cell has one holder (no replicas, no value parts), these bytes are a sum over ranks,
and a linear assignment minimizes it. Otherwise this is a heuristic: replicas in one group share the
bytes that enter it, which such a sum cannot express. Bundles of replicas are then assigned as well,
and the best order is taken. The given order is one of the candidates, so the result is never worse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rvdcomm.errors import LayoutError
from rvdcomm.layout import RVD, Ints, Layout, Mask, ranges_text
from rvdcomm.network import Links, Network, Topology

ElementCounts = NDArray[np.float64]

EXACT_BITS = 52
"""Costs of an assignment are floats, which represent whole numbers up to 2**EXACT_BITS exactly."""

MIN_LEVEL_WEIGHT = 1 << 10
"""The least ratio of the weights of two neighbouring levels, if exact weights are too large."""


def best_ranks(
    src: Layout,
    dst_rvd: RVD | str,
    topology: Links | None = None,
    *,
    ranks: Iterable[int] | None = None,
    cuts: str | Sequence[Sequence[int]] = "chunk",
) -> tuple[int, ...]:
    """An order of ranks for ``dst_rvd`` that moves few bytes: the fewest if cells have one holder.

    >>> src = Layout((4, 6), "R(1)V(1)D(4,1)")
    >>> best_ranks(src, "R(2)V(1)D(2,1)")  # ranks 0 and 1 hold the upper half already
    (0, 2, 1, 3)

    Args:
        src: the layout that the tensor has.
        dst_rvd, cuts: the wanted layout, as arguments of ``Layout``.
        topology: bytes are minimized by its levels, outermost first, or by levels that resemble a
            network; if None, all ranks are alike.
        ranks: ranks that may be used, at least as many as needed; the ranks of ``src`` if None.
            Among orders that move equally many bytes, the one nearest to this order is taken.

    Returns:
        Ranks for ``Layout(src.shape, dst_rvd, ranks, cuts)``.

    Raises:
        LayoutError: counts, cut points or ranks do not fit.

    Source: COSTA (Kabić et al., ISC 2021) finds a relabelling of two grids by linear assignment.
    """
    dst_rvd = RVD(dst_rvd)
    usable = tuple(src.ranks if ranks is None else ranks)
    if len(usable) < dst_rvd.num_ranks:
        raise LayoutError(
            f"{dst_rvd} needs {dst_rvd.num_ranks} ranks but {len(usable)} may be used; "
            "pass ranks= with at least as many."
        )
    if len(set(usable)) != len(usable):
        raise LayoutError(f"ranks {ranges_text(usable)} for {dst_rvd}: one is given twice.")
    given = Layout(src.shape, dst_rvd, usable[: dst_rvd.num_ranks], cuts)
    if topology is not None:
        topology.check_ranks({*src.ranks, *usable})
    levels = topology.nearest_levels if isinstance(topology, Network) else topology
    cells = _DstCells.of(src, given, usable, levels)
    candidates = [np.arange(len(cells.box)), _assigned(cells)]
    if cells.num_replicas > 1 and len(cells.levels) > 1:
        candidates.append(_bundled(cells))
    # Among equally good orders, `min` takes the first.
    order = min(candidates, key=cells.entering)
    return Layout(src.shape, dst_rvd, [usable[i] for i in order], given.cuts).ranks


# --- what enters --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _LevelHoldings:
    """What the groups of one topology level hold; the level has more than one group.

    Attributes:
        group: [usable ranks] the group of each rank.
        has: [groups, src boxes] whether a group has a box.
        is_whole: [src boxes] whether a group must have all parts of a box to have it, or just one.
        lacks: [groups, dst boxes] elements of a box that a group does not have.
    """

    group: Ints
    has: Mask
    is_whole: Mask
    lacks: ElementCounts

    @classmethod
    def of(
        cls, src: Layout, usable: Sequence[int], home: Mapping[int, int], overlap: ElementCounts
    ) -> _LevelHoldings:
        homes, group = np.unique([home[r] for r in (*usable, *src.ranks)], return_inverse=True)
        num_groups, num_boxes = len(homes), len(overlap)
        parts, position = np.zeros((num_groups, num_boxes), np.int32), np.arange(len(src.ranks))
        box, part = position % num_boxes, position // num_boxes % src.rvd.v
        held = np.unique(np.stack([group[len(usable) :], box, part]), axis=1)
        np.add.at(parts, (held[0], held[1]), 1)
        is_whole = (parts == src.rvd.v).any(axis=0)
        has = np.where(is_whole, parts == src.rvd.v, parts > 0)
        sizes = overlap.sum(axis=0)
        lacks = np.stack([sizes - overlap[boxes].sum(axis=0) for boxes in has])
        return cls(group[: len(usable)], has, is_whole, lacks)


@dataclass(frozen=True)
class _DstCells:
    """The cells of dst, numbered in the order of its ranks, and what the usable ranks have of them.

    ``overlap`` [src boxes, dst boxes] counts common elements, in units of their greatest common
    divisor. ``levels`` go from the innermost outwards. An *order* [cells] gives, for every cell,
    the index of its usable rank.
    """

    num_replicas: int
    num_parts: int
    num_src_parts: int
    num_usable: int
    overlap: ElementCounts
    levels: tuple[_LevelHoldings, ...]

    @classmethod
    def of(
        cls, src: Layout, dst: Layout, usable: Sequence[int], topology: Topology | None
    ) -> _DstCells:
        overlap = _overlap(src, dst)
        homes = topology.homes if topology else ({r: r for r in {*src.ranks, *usable}},)
        levels = tuple(
            _LevelHoldings.of(src, usable, home, overlap)
            for home in homes
            if len({home[rank] for rank in usable}) > 1
        )
        return cls(dst.rvd.r, dst.rvd.v, src.rvd.v, len(usable), overlap, levels)

    @cached_property
    def box(self) -> Ints:
        """The dst box of every cell."""
        return np.tile(np.arange(self.overlap.shape[1]), self.num_replicas * self.num_parts)

    @cached_property
    def value(self) -> Ints:
        """A number for every cell; the replicas of a cell have the same number."""
        return np.tile(np.arange(self.overlap.shape[1] * self.num_parts), self.num_replicas)

    def entering(self, order: Ints) -> tuple[float, ...]:
        """Elements that enter the groups of a level, outermost first, in units of ``overlap``."""
        return tuple(self._entering(level, order) for level in reversed(self.levels))

    def _entering(self, level: _LevelHoldings, order: Ints) -> float:
        """Elements that enter the groups of one level, counted as in docs/bound.md.

        An element enters every group that wants it and does not have it. If no group has all parts
        of the element, one group that wants it and has a part is not counted.
        """
        num_src_boxes, num_boxes = self.overlap.shape
        wants = np.zeros((len(level.lacks), num_boxes * self.num_parts), np.bool_)
        wants[level.group[order], self.value] = True
        saved = np.zeros((num_src_boxes, wants.shape[1]), np.int32)
        for has, wanted in zip(level.has, wants, strict=True):
            saved[np.ix_(has, wanted)] += 1
        saved[~level.is_whole] = np.minimum(saved[~level.is_whole], 1)
        messages = (wants.sum(axis=0) - saved).reshape(num_src_boxes, self.num_parts, num_boxes)
        # If src has one part, one part of dst takes the element.
        some = messages.min(axis=1) if self.num_src_parts == 1 else messages.sum(axis=1)
        return float((self.overlap * some).sum())


def _overlap(src: Layout, dst: Layout) -> ElementCounts:
    """[src boxes, dst boxes]: common elements, as the product over dims of common extents."""
    out = np.ones((1, 1))
    for a, b in zip(src.cuts, dst.cuts, strict=True):
        (low, high), (other_low, other_high) = (np.array([cut[:-1], cut[1:]]) for cut in (a, b))
        common = np.minimum.outer(high, other_high) - np.maximum.outer(low, other_low)
        out = np.kron(out, np.maximum(common, 0))
    return out / max(int(np.gcd.reduce(out.astype(np.int64), axis=None)), 1)


# --- orders -------------------------------------------------------------------------------------


def _assigned(cells: _DstCells) -> Ints:
    """The order in which groups lack the fewest elements of their cells, outer levels first.

    The order is a linear assignment. Among equal orders it moves the fewest ranks away from the
    given order.
    """
    num_cells = len(cells.box)
    cost = (np.arange(num_cells)[:, None] != np.arange(cells.num_usable)).astype(np.float64)
    for level, weight in zip(cells.levels, _weights(cells), strict=True):
        cost += weight * level.lacks[level.group].T[cells.box]
    return _least(cost)


def _weights(cells: _DstCells) -> list[float]:
    """The weight of an element per level: outer levels count first, the given order counts last."""
    most = cells.overlap.sum() * cells.num_replicas * cells.num_parts + 1
    first = float(len(cells.box) + 1)
    room = 2.0**EXACT_BITS / (most * first)
    ratio = min(most, max(room, 1.0) ** (1 / max(len(cells.levels) - 1, 1)))
    return [first * max(ratio, MIN_LEVEL_WEIGHT) ** i for i in range(len(cells.levels))]


def _bundled(cells: _DstCells) -> Ints:
    """An order that keeps the replicas of a cell together, level by level from the outermost in.

    In every group, the replicas of each cell are divided into bundles of equal size, and bundles
    are assigned to the groups inside. What a group lacks of a bundle enters the group once. The
    bundle size with the fewest entering elements is taken.
    """
    order = np.zeros(len(cells.box), np.int64)

    def place(depth: int, mine: Ints, ranks: Ints) -> None:
        level = cells.levels[depth]
        if depth == 0:
            cost = level.lacks[level.group[ranks]].T[cells.box[mine]]
            order[mine] = ranks[_least(cost)]
            return
        shares = min(_shares(cells, level, mine, ranks), key=lambda share: share[0])[1]
        for group in np.unique(shares):
            place(depth - 1, mine[shares == group], ranks[level.group[ranks] == group])

    place(len(cells.levels) - 1, np.arange(len(cells.box)), np.arange(cells.num_usable))
    return order


def _shares(
    cells: _DstCells, level: _LevelHoldings, mine: Ints, ranks: Ints
) -> Iterator[tuple[float, Ints]]:
    """For every bundle size: the elements that enter, and the group of every cell."""
    groups, room = np.unique(level.group[ranks], return_counts=True)
    by_value = mine[np.argsort(cells.value[mine], kind="stable")]
    where = np.argsort(np.argsort(cells.value[mine], kind="stable"))
    copies = np.unique(cells.value[mine], return_counts=True)[1]
    for size in range(1, int(copies.max()) + 1):
        slots = np.repeat(groups, room // size)
        if (copies % size).any() or len(slots) * size < len(mine):
            continue
        boxes = cells.box[by_value[::size]]
        chosen = slots[_least(level.lacks[slots].T[boxes])]
        shares = np.repeat(chosen, size)[where]
        pairs = np.unique(np.stack([shares, cells.value[mine]]), axis=1)
        entering = level.lacks[pairs[0], pairs[1] % cells.overlap.shape[1]].sum()
        yield float(entering), shares


def _least(cost: ElementCounts) -> Ints:
    """The column of every row in a cheapest assignment."""
    from scipy.optimize import linear_sum_assignment  # It takes half a second to import.

    columns: Ints = linear_sum_assignment(cost)[1]
    return columns
