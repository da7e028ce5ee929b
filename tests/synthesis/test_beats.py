"""Laws of beats: their time is that of the program, and hops of unequal latencies take turns."""

from __future__ import annotations

from dataclasses import replace

import pytest

import rvdcomm as rv
from rvdcomm.synthesis import beats_of, forests
from tests.cost.test_cuts import GATHER, OPTIMA, REDUCE, collective
from tests.synthesis.test_balance import unequal

NETWORKS = {
    "dgx-1": OPTIMA["dgx-1"][0],
    "2x8, a NIC for a rank": OPTIMA["2x8, a NIC for a rank"][0],
    "hosts of 4+2": unequal(4, 2),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.parametrize("layouts", [GATHER, REDUCE], ids=["gather", "reduce"])
@pytest.mark.parametrize("num_slices", [1, 2, 7])
def test_the_time_of_beats_is_that_of_the_program(name, layouts, num_slices: int) -> None:
    network = NETWORKS[name]
    src, dst = collective(network, *layouts)
    plan = rv.plan(src, dst, topology=network, executor="dist", trees=False)
    for forest in forests(src, dst, network):
        made = replace(plan, forest=forest, slices=num_slices)
        assert beats_of(forest).secs(num_slices, 4) == pytest.approx(made.cost.secs, rel=1e-3)


def test_near_and_far_hops_take_turns() -> None:
    network = unequal(4, 2)
    src, dst = collective(network, *REDUCE)
    found = [forest for forest in forests(src, dst, network) if forest.pace == "apart"]
    assert found
    for forest in found:
        assert forest.num_turns == 2
        for tree in forest.trees:
            for hops, beats in zip((tree.sums, tree.copies), forest.beats(tree), strict=True):
                for hop in hops:
                    is_far = (hop.src < 4) != (hop.dst < 4)
                    assert beats[hop.src, hop.dst] % 2 == is_far


def test_no_forests_for_many_ranks() -> None:
    topology = rv.Topology.single_host(65, 1e-6, 1e9)
    src, dst = collective(rv.Network.of(topology), *GATHER)
    assert list(forests(src, dst, rv.Network.of(topology))) == []
