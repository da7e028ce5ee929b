"""Laws of spanning trees: all demands are served, by one partner at a time, on any network."""

from __future__ import annotations

import random
from collections import Counter

import pytest

import rvdcomm as rv
from rvdcomm.cost import demands_of
from rvdcomm.synthesis import beats_of, quick_forest, relayed_forests
from rvdcomm.synthesis.forest import Forest
from rvdcomm.synthesis.spanning import spanning
from tests.cost.test_cuts import GATHER, REDUCE, SCATTER, collective
from tests.network.oracle import random_network
from tests.oracle import plan_faults, random_layout


def partners(forest: Forest) -> tuple[int, int]:
    """The most ranks that a rank sends to in a beat, and that it receives from."""
    pairs = {
        (beat, pair)
        for tree in forest.trees
        for side in forest.beats(tree)
        for pair, beat in side.items()
    }
    sent, received = (Counter((beat, pair[end]) for beat, pair in pairs) for end in (0, 1))
    return max(sent.values(), default=0), max(received.values(), default=0)


@pytest.mark.parametrize("seed", range(40))
def test_random_pairs_on_random_networks(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(3, 8)))
    ranks = [rng.sample(network.ranks, rng.randint(1, len(network.ranks))) for _ in range(2)]
    src, dst = (random_layout(rng, (12, 10), each) for each in ranks)
    if dst.rvd.v > 1:
        dst = rv.Layout(dst.shape, f"R({len(dst.ranks)})V(1)D(1,1)", dst.ranks)
    for forest in relayed_forests(src, dst, network):
        assert forest.faults() == []
        assert max(partners(forest)) <= 1
    plan = rv.plan(src, dst, "int64", network)
    steps = rv.plan(src, dst, "int64", network, trees=False)
    assert plan_faults(plan) == []
    assert plan.cost.secs <= steps.cost.secs * (1 + 1e-9)


@pytest.mark.parametrize("count", [2, 4, 8, 16])
@pytest.mark.parametrize("layouts", [GATHER, SCATTER, REDUCE], ids=["gather", "scatter", "reduce"])
def test_where_all_reach_all_rounds_are_those_of_doubling(
    count: int, layouts: tuple[str, str]
) -> None:
    network = rv.Network.of(rv.Topology.single_host(count, 1.0, 1e9))
    src, dst = collective(network, *layouts)
    quick = quick_forest(src, dst, network)
    found = spanning(demands_of(src, dst), network.wires, False)
    assert quick is not None
    assert found is not None
    assert beats_of(found).secs(1, 1) <= beats_of(quick).secs(1, 1) * 1.001


def test_small_tensors_on_a_ring_are_passed_on() -> None:
    ring = rv.Network.preset("ring", 6, link=rv.Link(1e-5, 1e9))
    src, dst = (rv.Layout((600,), text) for text in ("R(1)V(1)D(6)", "R(6)V(1)D(1)"))
    plan = rv.plan(src, dst, "float32", ring)
    steps = rv.plan(src, dst, "float32", ring, trees=False)
    assert plan.forest is not None
    assert plan.cost.secs < 0.6 * steps.cost.secs
    assert plan.gap < 2.1


def test_there_is_none_where_a_rank_does_not_reach_another() -> None:
    network = rv.Network.parse("0 -> 1  1 us  1 GB/s\n1 -> 0  1 us  1 GB/s")
    src, dst = rv.Layout((4,), "R(1)V(1)D(1)", [0]), rv.Layout((4,), "R(1)V(1)D(1)", [1])
    one_way = [wire for wire in network.wires if wire.src == 1]
    assert spanning(demands_of(src, dst), one_way, True) is None
    assert spanning(demands_of(src, src), network.wires, True) is None
