"""Candidates: the paths between two layouts from which the planner chooses.

Regular pairs over one rank set are searched as bindings (``search.py``). For all other pairs (cuts
that do not nest, groups that differ, overlap in part or are disjoint) one exchange leads from the
src group to the dst group, with these choices:

- before the exchange, the src group may sum its parts (reduce-scatter into flat pieces);
- after the exchange, the dst group may gather its replicas from flat pieces (all-gather);
- if neither side has replicas or parts, the smaller group may first change to the cuts of the
  larger one, so that each rank exchanges with few ranks of the other group.

The direct exchange is always a candidate, so every pair has a plan.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from math import prod

from rvdcomm.layout import RVD, Layout
from rvdcomm.network import Topology
from rvdcomm.planning.binding import Binding, R, V, refine
from rvdcomm.planning.path import Path, State, Step, exchange_step, steps_of_bindings
from rvdcomm.planning.primitives import RebindPricer, Targets
from rvdcomm.planning.search import cheapest_rebinds


def candidate_paths(
    src: Layout, dst: Layout, item_bytes: int, topology: Topology
) -> Iterator[Path]:
    """Paths from ``src`` to ``dst``; a single one where the costs of the search are exact."""
    if src == dst:
        yield Path(src, dst, ())
        return
    num_bytes = item_bytes * prod(src.shape)
    pair = refine(src, dst, topology)
    if pair is None:
        yield from _across_planes(src, dst, num_bytes, topology)
        return
    _, bindings = cheapest_rebinds(*pair, RebindPricer(pair[0].grid, topology, num_bytes))
    yield Path(src, dst, tuple(steps_of_bindings(bindings)))
    if not all(binding.is_even for binding in bindings):
        yield direct_path(src, dst)


def direct_path(src: Layout, dst: Layout, num_slices: int = 1) -> Path:
    """The path of one exchange, which runs in ``num_slices`` windows one after another."""
    return Path(src, dst, (exchange_step(State(src), State(dst), num_slices),))


# --- two planes ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class _PlanePath:
    """Steps inside one group, from the state ``src`` to the state ``dst``."""

    src: State
    dst: State
    steps: tuple[Step, ...]


def _across_planes(src: Layout, dst: Layout, num_bytes: int, topology: Topology) -> Iterator[Path]:
    heads, tails = _heads(src, num_bytes, topology), _tails(dst, num_bytes, topology)
    for head, tail in [*product(heads, tails), *_recut(src, dst, num_bytes, topology)]:
        yield Path(src, dst, (*head.steps, exchange_step(head.dst, tail.src), *tail.steps))


def _recut(
    src: Layout, dst: Layout, num_bytes: int, topology: Topology
) -> Iterator[tuple[_PlanePath, _PlanePath]]:
    """The smaller group changes to the other group's cuts, before or after the exchange.

    The same bytes cross between the groups, but in fewer and larger messages.
    """
    if src.rvd.v * src.rvd.r * dst.rvd.v * dst.rvd.r > 1 or not (src.is_even and dst.is_even):
        return
    if len(src.ranks) <= len(dst.ranks):
        middle = _cut_as(dst, src)
        pair = middle and refine(src, middle, topology)
        if pair:
            yield _plane_path(*pair, num_bytes, topology), _stay(dst)
    else:
        middle = _cut_as(src, dst)
        pair = middle and refine(middle, dst, topology)
        if pair:
            yield _stay(src), _plane_path(*pair, num_bytes, topology)


def _cut_as(pattern: Layout, layout: Layout) -> Layout | None:
    """A layout on the ranks of ``layout``, cut like ``pattern`` but k times as coarse in one dim.

    k is the ratio of their numbers of ranks. None if no dim allows this.
    """
    factor, rest = divmod(len(pattern.ranks), len(layout.ranks))
    for d, count in enumerate(pattern.rvd.d):
        if rest == 0 and count % factor == 0:
            counts = (*pattern.rvd.d[:d], count // factor, *pattern.rvd.d[d + 1 :])
            middle = Layout(layout.shape, RVD(1, 1, counts), layout.ranks)
            if middle != layout and middle.is_even:
                return middle
    return None


def _stay(layout: Layout) -> _PlanePath:
    return _PlanePath(State(layout), State(layout), ())


def _heads(layout: Layout, num_bytes: int, topology: Topology) -> Iterator[_PlanePath]:
    """Yield steps before the exchange: none, or a sum of the parts.

    Each replica sums on its own, or the replicas share the work.
    """
    yield _stay(layout)
    pair = refine(layout, layout, topology)
    if pair is None or layout.rvd.v == 1:
        return
    for targets in _scratched(pair[0], [(V,), (R, V)]):
        yield _plane_path(pair[0], Binding(pair[0].grid, targets), num_bytes, topology)


def _tails(layout: Layout, num_bytes: int, topology: Topology) -> Iterator[_PlanePath]:
    """Yield steps after the exchange: none, or a gather of replicas.

    Replicas are gathered over all ranks or inside the groups of one level.
    """
    yield _stay(layout)
    pair = refine(layout, layout, topology)
    if pair is None or layout.rvd.r == 1:
        return
    for targets in _scratched(pair[0], [(R,)]):
        yield _plane_path(Binding(pair[0].grid, targets), pair[0], num_bytes, topology)


def _plane_path(src: Binding, dst: Binding, num_bytes: int, topology: Topology) -> _PlanePath:
    _, bindings = cheapest_rebinds(src, dst, RebindPricer(src.grid, topology, num_bytes))
    steps = tuple(steps_of_bindings(bindings))
    return _PlanePath(State(bindings[0]), State(bindings[-1]), steps)


def _scratched(binding: Binding, choices: list[tuple[int, ...]]) -> Iterator[Targets]:
    """Targets with axes of the chosen roles, inside the groups of a level, on scratch digits."""
    grid = binding.grid
    seen = {binding.targets}
    for roles in choices:
        for block in sorted({*grid.blocks[1:], len(grid.ranks)}):
            targets = tuple(
                grid.scratch(a) if t in roles and axis.stride < block else t
                for a, (t, axis) in enumerate(zip(binding.targets, grid.axes, strict=True))
            )
            if targets not in seen:
                seen.add(targets)
                yield targets
