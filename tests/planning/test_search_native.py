"""Law of the native search: it finds the path of the Python definition, ties included."""

from __future__ import annotations

import random
from collections.abc import Iterable
from math import prod

import pytest

import rvdcomm as rv
from rvdcomm import native
from rvdcomm.network import Level
from rvdcomm.planning.binding import refine
from rvdcomm.planning.graph import graph_between
from rvdcomm.planning.primitives import RebindPricer
from rvdcomm.planning.search import find_states, search_states
from tests.oracle import all_pairs, all_rvds

pytestmark = pytest.mark.skipif(
    not hasattr(native.core, "cheapest_rebinds"), reason="the extension is not built"
)

LINKS = {
    "volume": [rv.Link(0, 8e9), rv.Link(0, 1e9), rv.Link(0, 5e8)],
    "mixed": [rv.Link(3e-6, 380e9), rv.Link(12e-6, 360e9), rv.Link(20e-6, 400e9)],
    "measured": [rv.Link(1.2345678e-5, 3.1415926e9), rv.Link(6.543e-5, 1.17e9), rv.Link(1e-4, 1e8)],
}


def levels(num_ranks: int, sizes: Iterable[int], links: str) -> rv.Topology:
    """Ranks in runs of these sizes, one level each."""
    rows = zip(("rank", "host", "rack"), sizes, LINKS[links], strict=False)
    return rv.Topology(
        tuple(
            Level(name, tuple(tuple(range(i, i + s)) for i in range(0, num_ranks, s)), link)
            for name, s, link in rows
        )
    )


def differing(pairs: Iterable[tuple[rv.Layout, rv.Layout]], topology: rv.Topology) -> list[str]:
    """Pairs for which the two searches differ in cost or in any state."""
    found = []
    for pair in pairs:
        bindings = refine(*pair, topology)
        if bindings is None or bindings[0].targets == bindings[1].targets:
            continue
        src, dst = (binding.targets for binding in bindings)
        pricer = RebindPricer(bindings[0].grid, topology, 4 * prod(pair[0].shape))
        python = search_states(src, graph_between(src, dst, pricer))
        if find_states(src, dst, pricer) != python:
            found.append(f"{pair[0].rvd} -> {pair[1].rvd}")
    return found


@pytest.mark.many(4)
@pytest.mark.parametrize(
    "num_ranks, shape, sizes, links",
    [
        (4, (8, 12), (1,), "volume"),
        (4, (8, 12), (1, 2), "mixed"),
        (8, (16,), (1,), "measured"),
        (8, (16,), (1, 2, 4), "volume"),
        (8, (16,), (1, 4), "mixed"),
        (8, (16, 24), (1, 4), "measured"),
        (8, (16, 24), (1, 2, 4), "mixed"),
        (8, (16, 24), (1, 2), "volume"),
    ],
)
def test_native_and_python_search_find_the_same_path_for_small_pairs(
    num_ranks: int, shape: tuple[int, ...], sizes: tuple[int, ...], links: str
) -> None:
    assert differing(all_pairs(shape, num_ranks), levels(num_ranks, sizes, links)) == []


@pytest.mark.parametrize(
    "num_ranks, num_pairs, num_levels, links",
    [
        (12, 60, 3, "volume"),
        (12, 60, 1, "measured"),
        (64, 20, 2, "mixed"),
        (64, 20, 3, "measured"),
        (64, 20, 3, "mixed"),
        (1024, 5, 2, "measured"),
        (4096, 3, 3, "mixed"),
    ],
)
def test_native_and_python_search_find_the_same_path_for_random_pairs(
    num_ranks: int, num_pairs: int, num_levels: int, links: str
) -> None:
    rng = random.Random(num_ranks)
    shape, rvds = (num_ranks,) * 3, all_rvds(num_ranks, 3)
    ends = (rv.Layout(shape, rng.choice(rvds)) for _ in range(2 * num_pairs))
    sizes = (1, 2, num_ranks // 2)[:num_levels]
    assert differing(zip(ends, ends, strict=True), levels(num_ranks, sizes, links)) == []


def test_costs_beyond_127_bits_are_left_to_the_python_search() -> None:
    topology = rv.Topology.single_host(4, 1e-30, 1e30)
    pair = refine(rv.Layout((8,), "R(1)V(1)D(4)"), rv.Layout((8,), "R(4)V(1)D(1)"), topology)
    assert pair is not None
    pricer = RebindPricer(pair[0].grid, topology, 10**40)
    ticks, states = find_states(pair[0].targets, pair[1].targets, pricer)
    assert (ticks.bit_length() > 127, len(states)) == (True, 2)
