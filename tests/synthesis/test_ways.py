"""Ways: what may not be in them, and that those of every kind of forest serve their demands."""

import random
from dataclasses import replace

import pytest

import rvdcomm as rv
from rvdcomm.cost import demands_of
from rvdcomm.synthesis import beats_in_full, beats_of, forests, quick_forest, relayed_forests
from rvdcomm.synthesis.forest import Hop, Tree, faults_of
from tests.network.oracle import random_network, random_pair_on

DGX1 = rv.Network.preset("dgx-1")
REPLICAS = {
    "dgx-1": (DGX1, "R(2)V(1)D(1)", "R(8)V(1)D(1)", (0, 1)),
    "torus": (rv.Network.preset("torus", 3, 3), "R(3)V(1)D(1)", "R(9)V(1)D(1)", (0, 4, 5)),
    "mesh": (rv.Network.preset("mesh", 2, 3), "R(2)V(1)D(3)", "R(6)V(1)D(1)", range(6)),
}


@pytest.mark.parametrize("size", [64, 1000, 1 << 20])
@pytest.mark.parametrize("case", REPLICAS)
def test_no_holder_and_no_reader_gets_an_element_twice(case: str, size: int) -> None:
    network, before, after, ranks = REPLICAS[case]
    src = rv.Layout((size,), before, ranks)
    dst = rv.Layout((size,), after, network.ranks)
    found = [*forests(src, dst, network), *relayed_forests(src, dst, network)]
    assert [fault for forest in found for fault in forest.faults()] == []
    made = rv.plan(src, dst, "float32", network, executor="dist")
    made.verify()
    rv.plan_many({"a": src}, {"a": dst}, "float32", topology=network).verify()


@pytest.mark.parametrize("seed", range(40))
def test_forests_of_every_kind_serve_random_demands(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(2, 8)))
    src, dst = random_pair_on(rng, network)
    found = [*forests(src, dst, network), *relayed_forests(src, dst, network)]
    found += filter(None, [quick_forest(src, dst, network)])
    assert [fault for forest in found for fault in forest.faults()] == []


def test_ways_that_serve_a_rank_twice_are_refused() -> None:
    src, dst = rv.Layout((8,), "R(2)V(1)D(1)", (0, 1)), rv.Layout((8,), "R(4)V(1)D(1)", range(4))
    (demand,) = demands_of(src, dst)

    def hop(a: int, b: int) -> Hop:
        return Hop(a, b, (0,))

    assert faults_of((Tree(0, (), (hop(0, 2), hop(2, 3))),), demand) == []
    through_holder = Tree(0, (), (hop(0, 1), hop(1, 2), hop(2, 3)))
    assert faults_of((through_holder,), demand) == ["rank 1 gets it twice"]
    both = Tree(0, (), (hop(0, 2),)), Tree(1, (), (hop(1, 2), hop(2, 3)))
    assert faults_of(both, demand) == ["rank 2 gets it twice"]


@pytest.mark.parametrize("wires", [[], [9999], [-1], [10**30], [0, 0]])
def test_wires_that_lead_elsewhere_are_refused(wires: list[int]) -> None:
    src, dst = rv.Layout((64,), "R(1)V(1)D(8)"), rv.Layout((64,), "R(8)V(1)D(1)")
    forest = next(forests(src, dst, DGX1))
    values = forest.to_json()
    values["ways"][0][0][2][0][2][0][2] = wires
    with pytest.raises(rv.LayoutError, match=r"the trees do not serve this call: wires \["):
        forest.with_ways(values)


SIZES = [4268737, 17074993, 68299993, 499188385]


@pytest.mark.parametrize("size", SIZES)
def test_trees_that_are_given_are_cut_into_as_many_slices(size: int) -> None:
    src, dst = rv.Layout((size,), "R(1)V(1)D(8)"), rv.Layout((size,), "R(8)V(1)D(1)")
    for forest in forests(src, dst, DGX1):
        again = forest.with_ways(forest.to_json())
        assert beats_of(again).best_num_slices(4) == beats_of(forest).best_num_slices(4)
        assert beats_of(again).secs(8, 4) == beats_of(forest).secs(8, 4)


def test_costs_count_the_elements_themselves() -> None:
    size = 10**9 + 1
    src = rv.Layout((size,), "R(1)V(1)D(2)", range(2), cuts=([0, 146146132, size],))
    dst = rv.Layout((size,), "R(2)V(1)D(1)", range(2))
    network = rv.Network.preset("ring", 3, link=rv.Link(1e-6, 1e9))
    for forest in forests(src, dst, network):
        exact = beats_in_full(forest).secs(1, 4)
        rounded = beats_of(forest).secs(1, 4)
        assert exact >= forest.secs * 4
        assert rounded == pytest.approx(exact, rel=2e-3)
        assert replace(forest, pattern=None).secs == forest.secs


def test_a_message_that_ranks_pass_on_pays_each_latency() -> None:
    network = rv.Network.preset("ring", 4, link=rv.Link(5e-6, 1e9))
    src = rv.Layout((64,), "R(1)V(1)D(1)", [0])
    made = rv.plan(src, rv.Layout((64,), "R(1)V(1)D(1)", [2]), "float32", network)
    assert made.cost.secs >= made.bound.secs * (1 - 1e-9)
    size, ranks = 1 << 20, [0, 6]
    src, dst = (rv.Layout((size,), x, ranks) for x in ("R(1)V(1)D(2)", "R(2)V(1)D(1)"))
    made = rv.plan(src, dst, "float32", DGX1)
    assert made.cost.secs >= made.bound.secs * (1 - 1e-9)
