"""Modelled bound: the lower bound of regular pairs by formula, in time linear in the ranks.

It is the bound of ``rvdcomm/cost/bound.py``, which counts elements with masks of all homes. Here a
home is identified by its coordinates on the axes outside it, and the bindings of these axes say
what the home has and wants. Both bounds are equal where shards are equal
(tests/plans/test_modelled.py). Otherwise every piece counts with the size of the smallest one,
which can only lower the bound.

Source: docs/bound.md, "By formula".
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rvdcomm.cost import Cost, LevelBound, cost_of_levels
from rvdcomm.layout import Ints, Layout
from rvdcomm.network import Topology
from rvdcomm.planning.binding import Binding, R, V, refine
from rvdcomm.planning.transfer import equal_distance


def modelled_bound(src: Layout, dst: Layout, item_bytes: int, topology: Topology) -> Cost | None:
    """``lower_bound`` by formula; None where the formula does not hold.

    It holds for regular pairs on one group, and for regular layouts on two groups if all pairs of
    ranks are equally far apart.
    """
    if src.span is not None and src.span == dst.span:
        levels = _in_group(src, dst, topology)
    else:
        levels = _between_groups(src, dst, topology)
    if levels is None:
        return None
    shards = src.largest_shard, dst.largest_shard
    is_sum = src.span == dst.span and src.is_even and dst.is_even
    return cost_of_levels(levels, sum(shards) if is_sum else max(shards), item_bytes, topology)


def _least_elements(binding: Binding) -> int:
    """Elements of the tensor if all its pieces were as small as the smallest."""
    return prod(int(np.diff(cut).min()) * (len(cut) - 1) for cut in binding.grid.cuts)


@dataclass(frozen=True, slots=True)
class _Outer:
    """What the homes of a level have, or want, according to the binding of the axes outside them.

    ``r`` homes have equal elements. ``v`` homes have one part each of the same elements. One home
    has ``size`` elements.
    """

    r: int
    v: int
    size: int

    @classmethod
    def of(cls, binding: Binding, axes: Iterable[int], num_elements: int) -> _Outer:
        counts = {R: 1, V: 1, 0: 1}
        for a in axes:
            counts[min(binding.targets[a], 0)] *= binding.grid.axes[a].size
        return cls(counts[R], counts[V], num_elements // counts[0])


# --- one group ----------------------------------------------------------------------------------


def _in_group(src: Layout, dst: Layout, topology: Topology) -> list[LevelBound] | None:
    pair = refine(src, dst, topology)
    if pair is None:
        return None
    size = _least_elements(pair[0])
    levels = []
    for axes, block in zip(pair[0].grid.outer_axes, pair[0].grid.blocks, strict=True):
        has, wants = (_Outer.of(binding, axes, size) for binding in pair)
        common = _common(*pair, axes, block, size)
        into = out_of = nothing = np.zeros_like(common)
        if dst.rvd.v == 1:
            into = wants.size - (common if has.v == 1 else nothing)
        if dst.rvd.v == 1 and has.r == 1:
            out_of = has.size - (common if wants.r == 1 else nothing)
        meets = _meeting_share(*pair, axes)
        if src.rvd.v == 1 and dst.rvd.v > 1:
            both = prod(
                pair[0].grid.axes[a].size
                for a in axes
                if pair[0].targets[a] == R == pair[1].targets[a]
            )
            messages = size * wants.r - size * both // meets
        elif dst.rvd.v > 1:
            messages = size * max(has.v - dst.rvd.v, 0)
        elif has.v == 1:
            messages = int(into.sum())
        else:
            messages = size * (has.v + wants.r - 1) - size // meets
        levels.append(LevelBound.of(into, out_of, messages, len(common)))
    return levels


def _common(src: Binding, dst: Binding, axes: Sequence[int], block: int, size: int) -> Ints:
    """[homes]: the elements that a home wants and has some part of."""
    grid = src.grid
    position = np.arange(0, len(grid.ranks), block)
    holder = {src.targets[a]: a for a in axes if src.targets[a] >= 0}
    is_met, share = np.ones(len(position), np.bool_), 1
    for t in {*holder, *(dst.targets[a] for a in axes if dst.targets[a] >= 0)}:
        pair = [holder.get(t), next((a for a in axes if dst.targets[a] == t), None)]
        known = [grid.axes[a] for a in pair if a is not None]
        share *= known[0].size
        if len(known) == 2:
            one, other = (position // axis.stride % axis.size for axis in known)
            is_met &= one == other
    return np.where(is_met, size // share, 0)


def _meeting_share(src: Binding, dst: Binding, axes: Sequence[int]) -> int:
    """The n such that, for one element in n, some home wants the element and has some part of it.

    For each axis that is bound to a digit in src and in dst, the element has equal values in both
    digits.
    """
    root: dict[int, int] = {}

    def find(t: int) -> int:
        while root.get(t, t) != t:
            t = root[t]
        return t

    share = 1
    for a in axes:
        s, t = src.targets[a], dst.targets[a]
        if s >= 0 and t >= 0 and find(s) != find(t):
            root[find(s)] = find(t)
            share *= src.grid.axes[a].size
    return share


# --- two groups ---------------------------------------------------------------------------------


def _between_groups(src: Layout, dst: Layout, topology: Topology) -> list[LevelBound] | None:
    if src.span is None or dst.span is None or topology.runs is None:
        return None
    distance = equal_distance(src.span, dst.span, topology)
    sides = [refine(layout, layout, topology) for layout in (src, dst)]
    if distance is None or sides[0] is None or sides[1] is None:
        return None
    a, b = sides[0][0], sides[1][0]
    size = min(_least_elements(a), _least_elements(b))
    levels = []
    for i, (src_axes, dst_axes) in enumerate(
        zip(a.grid.outer_axes, b.grid.outer_axes, strict=True)
    ):
        if i >= distance:
            levels.append(LevelBound(0, 0, 0))
            continue
        has, wants = _Outer.of(a, src_axes, size), _Outer.of(b, dst_axes, size)
        num_src, num_dst = (
            prod(x.grid.axes[axis].size for axis in axes)
            for x, axes in ((a, src_axes), (b, dst_axes))
        )
        into = np.full(num_dst, wants.size if dst.rvd.v == 1 else 0)
        out_of = np.full(num_src, has.size if dst.rvd.v == 1 and has.r == 1 else 0)
        if src.rvd.v == 1 or dst.rvd.v == 1:
            messages = size * (has.v - 1 + wants.r)
        else:
            messages = size * max(has.v - dst.rvd.v, 0)
        levels.append(LevelBound.of(into, out_of, messages, num_src + num_dst))
    return levels
