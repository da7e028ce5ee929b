"""Laws of doubling: all demands are served, in as few rounds as there are doublings."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

import rvdcomm as rv
from rvdcomm.cost import demands_of
from rvdcomm.synthesis import beats_of, quick_forest
from rvdcomm.synthesis.doubling import circle_edges, doubling
from tests.cost.test_cuts import GATHER, REDUCE, SCATTER, collective
from tests.oracle import plan_faults, random_layout

ONE_HOST = {n: rv.Topology.single_host(n, 3e-6, 300e9) for n in (2, 3, 5, 8, 13, 16, 64, 128)}


@pytest.mark.parametrize("count", [2, 3, 5, 8, 13, 16])
@pytest.mark.parametrize(
    "layouts, times", [(GATHER, 1), (SCATTER, 1), (REDUCE, 2)], ids=["gather", "scatter", "reduce"]
)
def test_rounds_are_as_many_as_doublings(count: int, layouts: tuple[str, str], times: int) -> None:
    network = rv.Network.of(ONE_HOST[count])
    src, dst = collective(network, *layouts)
    forest = quick_forest(src, dst, network)
    assert forest is not None
    assert forest.faults() == []
    made = replace(rv.plan(src, dst, topology=network, executor="dist"), forest=forest, slices=1)
    assert made.cost.rounds == times * (count - 1).bit_length()
    assert beats_of(forest).secs(1, 4) == pytest.approx(made.cost.secs, rel=1e-3)


@pytest.mark.parametrize(
    "count, texts, most",
    [
        (64, ("R(1)V(1)D(64)", "R(64)V(1)D(1)"), 6),
        (128, ("R(1)V(1)D(128)", "R(128)V(1)D(1)"), 7),
        (16, ("R(1)V(16)D(1)", "R(16)V(1)D(1)"), 8),
    ],
)
def test_small_tensors_take_few_rounds(count: int, texts: tuple[str, str], most: int) -> None:
    src, dst = (rv.Layout((1024,), text) for text in texts)
    plan = rv.plan(src, dst, topology=ONE_HOST[count], executor="dist")
    assert plan.cost.rounds == most
    large = (rv.Layout((1 << 28,), text) for text in texts)
    assert rv.plan(*large, topology=ONE_HOST[count], executor="dist").forest is None


@pytest.mark.parametrize("seed", range(40))
def test_few_rounds_give_right_data_for_random_pairs(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 9)
    topology = rv.Topology.single_host(count, 1.0, 1e9)
    ranks = [rng.sample(range(count), rng.randint(1, count)) for _ in range(2)]
    src, dst = (random_layout(rng, (24, 30), each) for each in ranks)
    if dst.rvd.v > 1:
        dst = rv.Layout(dst.shape, f"R({len(dst.ranks)})V(1)D(1,1)", dst.ranks)
    steps = rv.plan(src, dst, "int64", topology, executor="dist", trees=False)
    plan = rv.plan(src, dst, "int64", topology, executor="dist")
    assert plan_faults(plan) == []
    assert plan.cost.secs <= steps.cost.secs * (1 + 1e-9)


def test_there_is_none_where_ranks_pass_messages_on() -> None:
    network = rv.Network.preset("line", 4, link=rv.Link(1e-6, 1e9))
    src, dst = collective(network, *GATHER)
    assert quick_forest(src, dst, network) is None
    assert doubling(demands_of(src, src), network.wires) is None


def test_branches_without_ends_are_cut_off() -> None:
    assert circle_edges(2, [0], 3) == [(2, 0)]
    assert circle_edges(0, [7], 8) == [(0, 1), (1, 3), (3, 7)]
    assert sorted({b for _, b in circle_edges(3, range(6), 6)} | {3}) == list(range(6))
