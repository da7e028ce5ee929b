"""Search: a low-cost sequence of rebinds between two bindings of one grid.

The search is A*. A state is a binding's targets, one for every axis; an edge is one step. Costs are
whole ticks, so that equal costs compare equal. Ties are broken by rounds, then by the number of
steps, then by the smaller preceding state, then by the order of ``TransitionGraph.successors``. So
the result depends on the numbering of the axes and on nothing else. The direct exchange from the
start to the goal is always a step, so a path always exists.

This module defines the search. ``csrc/search/search.cpp`` finds the same path at the same cost,
faster (tests/planning/test_search_native.py compares the two).
"""

from __future__ import annotations

import heapq
from itertools import count, pairwise

from rvdcomm import native
from rvdcomm.planning.binding import Binding
from rvdcomm.planning.graph import ThoroughGraph, TransitionGraph, Units, graph_between
from rvdcomm.planning.primitives import RebindPricer, Targets

FEW_UNITS = 6
"""Up to this many axes (64 ranks and more) most searches run to completion."""

MAX_SUCCESSORS_OF_FEW, MAX_SUCCESSORS = 4000, 1200
"""After this many successors the best path so far is taken: a search takes below 1 ms
(bench/results/planning.json)."""

MAX_UNITS = 9
"""Up to this many axes every set of them may move; beyond, only ``coarse_units`` move."""

MAX_NATIVE_BITS = 120
"""Costs below 2**MAX_NATIVE_BITS, and their sums, fit in the 128 bits of the native search."""

PathCost = tuple[int, int, int]
"""(ticks, rounds, steps) of a path, compared in this order."""


def cheapest_rebinds(src: Binding, dst: Binding, pricer: RebindPricer) -> tuple[int, list[Binding]]:
    """The path of least cost that the search finds: its cost in ticks, and its bindings in order.

    This is the cheapest path of the graph, unless ``MAX_SUCCESSORS`` ends the search early. The
    graph may leave out steps (``LeanGraph``).

    >>> from rvdcomm.layout import Layout
    >>> from rvdcomm.network import Topology
    >>> from rvdcomm.planning.binding import refine
    >>> host = Topology.single_host(8, 0, 1)
    >>> pair = refine(Layout((64,), "R(2)V(4)D(1)"), Layout((64,), "R(8)V(1)D(1)"), host)
    >>> ticks, path = cheapest_rebinds(*pair, RebindPricer(pair[0].grid, host, 64))
    >>> pricer_bytes = 1.25 * 64
    >>> RebindPricer(pair[0].grid, host, 64).secs(ticks) == pricer_bytes
    True
    """
    ticks, states = find_states(src.targets, dst.targets, pricer)
    return ticks, _bindings(src, dst, states)


def find_states(src: Targets, dst: Targets, pricer: RebindPricer) -> tuple[int, list[Targets]]:
    """The path as targets, from the native search if it is installed and the numbers fit."""
    if src == dst:
        return 0, [src]
    graph = graph_between(src, dst, pricer)
    if native.core is None or not _fits(pricer):
        return search_states(src, graph)
    grid, ports = pricer.grid, pricer.ports
    ticks, states = native.core.cheapest_rebinds(
        src,
        graph.start,
        dst,
        graph.units if len(graph.units) <= MAX_UNITS else [],
        graph.coarse_units,
        isinstance(graph, ThoroughGraph),
        pricer.sizes,
        pricer.levels,
        [digit.size for digit in grid.digits],
        grid.blocks,
        len(grid.ranks),
        pricer.num_bytes,
        ports.a_unit,
        ports.a_round,
        MAX_SUCCESSORS,
        _max_successors(graph.units),
    )
    return ticks, states


def _fits(pricer: RebindPricer) -> bool:
    """Whether all costs fit in 128 bits, and axes, targets and ranks fit the native search."""
    grid, ports = pricer.grid, pricer.ports
    num_ranks = len(grid.ranks)
    ticks = pricer.num_bytes * num_ranks**3 * max(ports.a_unit)
    ticks += num_ranks * max(ports.a_round)
    num_axes, num_targets = len(grid.axes), len(grid.axes) + len(grid.digits)
    return (
        num_axes <= 16
        and num_targets <= 64
        and num_ranks <= 2**20
        and ticks.bit_length() <= MAX_NATIVE_BITS
    )


def search_states(src: Targets, graph: TransitionGraph) -> tuple[int, list[Targets]]:
    """The path as targets, found by the Python search."""
    pricer, dst = graph.pricer, graph.dst
    found: list[Targets] = []
    if graph.coarse_units:
        found = _found(graph, graph.coarse_units, None, MAX_SUCCESSORS)
        _split_steps(found, pricer)
    if len(graph.units) <= MAX_UNITS:
        known = _key(found, pricer) if found else None
        found = _found(graph, graph.units, known, _max_successors(graph.units)) or found
    states = [src, *found, dst]
    states = [s for i, s in enumerate(states) if i == 0 or s != states[i - 1]]
    _join_steps(states, pricer)
    _split_steps(states, pricer)
    return _key(states, pricer)[0], states


def _key(states: list[Targets], pricer: RebindPricer) -> PathCost:
    """The cost of a path."""
    prices = [pricer.ticks(before, after) for before, after in pairwise(states)]
    return sum(ticks for ticks, _ in prices), sum(rounds for _, rounds in prices), len(prices)


def _max_successors(units: Units) -> int:
    return MAX_SUCCESSORS_OF_FEW if len(units) <= FEW_UNITS else MAX_SUCCESSORS


def _found(
    graph: TransitionGraph, units: Units, known: PathCost | None, max_successors: int
) -> list[Targets]:
    """States of the cheapest path that is found to a goal; empty if none is below ``known``."""
    order = count()
    start = graph.start
    best: dict[Targets, PathCost] = {start: (0, 0, 0)}
    parent: dict[Targets, Targets] = {}
    # Entries are (bound of a full path, deepest first, oldest first, key, state).
    heap = [((*graph.bound(start), 0), 0, next(order), best[start], start)]
    goal: Targets | None = start if graph.is_goal(start) else None
    num_successors = 0
    while heap and num_successors <= max_successors:
        _, _, _, key, state = heapq.heappop(heap)
        if key != best[state]:
            continue
        if graph.is_goal(state):
            break
        for successor in graph.successors(state, units):
            num_successors += 1
            ticks, rounds = graph.pricer.ticks(state, successor)
            new = (key[0] + ticks, key[1] + rounds, key[2] + 1)
            if successor in best and best[successor] <= new:
                if best[successor] == new:
                    parent[successor] = min(parent[successor], state)
                continue
            is_goal = graph.is_goal(successor)
            bound_ticks, bound_rounds = graph.bound(successor)
            full = (new[0] + bound_ticks, new[1] + bound_rounds, new[2] + (not is_goal))
            if known is not None and full >= known:
                continue
            best[successor] = new
            parent[successor] = state
            if is_goal:
                goal, known = successor, new
            heapq.heappush(heap, (full, -new[2], next(order), new, successor))
    if goal is None:
        return []
    states = [goal]
    while states[-1] != start:
        states.append(parent[states[-1]])
    return states[::-1]


def _split_steps(states: list[Targets], pricer: RebindPricer) -> None:
    """Move one axis of a step before or after the other axes, where that is cheaper."""
    i = 0
    while i < len(states) - 1:
        before, after = states[i : i + 2]
        cheapest, best = pricer.ticks(before, after), None
        for a in (a for a, (s, t) in enumerate(zip(before, after, strict=True)) if s != t):
            for base, other in ((before, after), (after, before)):
                middle = (*base[:a], other[a], *base[a + 1 :])
                if not (pricer.is_priced(before, middle) and pricer.is_priced(middle, after)):
                    continue
                first, second = pricer.ticks(before, middle), pricer.ticks(middle, after)
                if (total := (first[0] + second[0], first[1] + second[1])) < cheapest:
                    cheapest, best = total, middle
        if best is None:
            i += 1
        else:
            states.insert(i + 1, best)


def _join_steps(states: list[Targets], pricer: RebindPricer) -> None:
    """Join two steps where one step costs no more: a slice and the step after it, for example."""
    i = 1
    while i < len(states) - 1:
        before, state, after = states[i - 1 : i + 2]
        if pricer.is_priced(before, after):
            first, second = pricer.ticks(before, state), pricer.ticks(state, after)
            joined = pricer.ticks(before, after)
            if joined <= (first[0] + second[0], first[1] + second[1]):
                del states[i]
                i = max(i - 1, 1)
                continue
        i += 1


def _bindings(src: Binding, dst: Binding, states: list[Targets]) -> list[Binding]:
    """The path's bindings; scratch cuts are nested in the same order in all bindings.

    An axis that leaves its scratch digit later is cut farther outside, so that the pieces that are
    gathered first are contiguous.
    """
    grid = src.grid
    last_use = {
        a: i
        for i, targets in enumerate(states)
        for a, t in enumerate(targets)
        if t == grid.scratch(a)
    }
    order = tuple(sorted(last_use, key=lambda a: (-last_use[a], a)))
    return [Binding(grid, targets, order) for targets in states]
