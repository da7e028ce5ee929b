"""Laws of the search's graphs: bounds hold along every path, every step has a price."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import pairwise
from math import prod

import rvdcomm as rv
from rvdcomm.planning.binding import R, V, refine
from rvdcomm.planning.graph import LeanGraph, ThoroughGraph, TransitionGraph, graph_between
from rvdcomm.planning.primitives import RebindPricer
from rvdcomm.planning.search import search_states
from tests.oracle import all_rvds

HOSTS = rv.Topology.hosts(
    [range(h, h + 4) for h in range(0, 16, 4)], rv.Link(3.0, 8.0), rv.Link(50.0, 1.0)
)
SHAPE = (64, 64)


def graph_of(src: str, dst: str, topology: rv.Topology = HOSTS) -> TransitionGraph:
    pair = refine(rv.Layout(SHAPE, src), rv.Layout(SHAPE, dst), topology)
    assert pair is not None
    pricer = RebindPricer(pair[0].grid, topology, prod(SHAPE))
    return graph_between(pair[0].targets, pair[1].targets, pricer)


def lean_graphs(count: int) -> Iterator[LeanGraph]:
    rng, rvds = random.Random(0), [str(rvd) for rvd in all_rvds(16, 2)]
    while count:
        graph = graph_of(rng.choice(rvds), rng.choice(rvds))
        if isinstance(graph, LeanGraph):
            count -= 1
            yield graph


def test_few_free_axes_give_a_thorough_graph_and_many_a_lean_one() -> None:
    assert isinstance(graph_of("R(1)V(16)D(1,1)", "R(1)V(1)D(16,1)"), ThoroughGraph)
    assert isinstance(graph_of("R(2)V(2)D(2,2)", "R(2)V(1)D(2,4)"), LeanGraph)


def test_bound_is_never_above_the_remaining_cost_of_a_path() -> None:
    wrong = []
    for graph in lean_graphs(60):
        _, states = search_states(graph.start, graph)
        rest = 0, 0
        for before, after in reversed(list(pairwise(states))):
            ticks, rounds = graph.pricer.ticks(before, after)
            rest = rest[0] + ticks, rest[1] + rounds
            if graph.bound(before)[0] > rest[0]:
                wrong.append(f"{before} -> {graph.dst}: {graph.bound(before)}, costs {rest}")
    assert wrong == []


def test_every_successor_of_the_start_has_a_price() -> None:
    unpriced = [
        (graph.start, successor)
        for graph in lean_graphs(30)
        for successor in graph.successors(graph.start, graph.units)
        if not graph.pricer.is_priced(graph.start, successor)
    ]
    assert unpriced == []


def test_graph_starts_with_sliced_replicas() -> None:
    # The goal binds the axis that is R in src to a digit of dim 0.
    graph = graph_of("R(2)V(4)D(1,2)", "R(1)V(1)D(2,8)")
    assert R not in graph.start


def test_replicas_that_become_parts_start_on_scratch_digits() -> None:
    graph = graph_of("R(4)V(2)D(2,1)", "R(2)V(2)D(1,4)")
    masked = [a for a, t in enumerate(graph.dst) if t == V and graph.start[a] != V]
    scratch = [graph.pricer.grid.scratch(a) for a in masked]
    assert [graph.start[a] for a in masked] == scratch


def test_coarse_units_are_fewer_and_hold_the_same_axes() -> None:
    graph = graph_of("R(2)V(2)D(2,2)", "R(2)V(1)D(2,4)")
    fine, coarse = (
        sorted(a for unit in units for a in unit) for units in (graph.units, graph.coarse_units)
    )
    assert (coarse, len(graph.coarse_units) < len(graph.units)) == (fine, True)
