"""Laws of packing: all demands are served, near the bound that no schedule beats."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from fractions import Fraction

import pytest

import rvdcomm as rv
from rvdcomm.cost import demands_of, flow_bound, wires_of_members
from rvdcomm.synthesis import Forest, forest_of, pack
from rvdcomm.synthesis.packing import CHUNKS, NEAR
from tests.cost.test_cuts import GATHER, OPTIMA, REDUCE, SCATTER, collective
from tests.network.oracle import random_network, random_pair_on

SMALL = ["1x8", "4x2", "dgx-1", "line"]
"""Those of at most as many ranks as are packed."""


def packed(src: rv.Layout, dst: rv.Layout, network: rv.Network) -> Forest:
    forest = pack(demands_of(src, dst), wires_of_members(network, {*src.ranks, *dst.ranks}))
    assert forest.faults() == []
    return forest


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("layouts", [GATHER, SCATTER, REDUCE], ids=["gather", "scatter", "reduce"])
def test_trees_are_within_two_percent_of_the_bound_on_published_networks(name, layouts) -> None:
    network, _ = OPTIMA[name]
    src, dst = collective(network, *layouts)
    forest = packed(src, dst, network)
    bound = flow_bound(src, dst, 1, network).secs
    assert bound * (1 - 1e-9) <= forest.secs <= 1.02 * bound
    # The program's own bound: the trees lose what rounding to whole chunks takes.
    assert forest.least_secs <= forest.secs * (1 + 1e-9)
    assert bound <= forest.least_secs * (1 + 2 * NEAR)


@pytest.mark.parametrize("seed", range(40))
def test_trees_serve_random_pairs_on_random_networks(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(2, 6)))
    src, dst = random_pair_on(rng, network)
    forest = packed(src, dst, network)
    bound = flow_bound(src, dst, 1, network).secs
    assert forest.secs >= bound * (1 - 1e-9)
    assert forest.least_secs <= forest.secs * (1 + 1e-6)
    for ways in forest.ways:
        assert all(share.denominator <= CHUNKS for _, share in ways)


def test_nothing_to_do_needs_no_trees() -> None:
    network = rv.Network.preset("ring", 4)
    layout = rv.Layout((8,), "R(1)V(1)D(4)")
    assert packed(layout, layout, network).secs == 0.0
    empty = rv.Layout((0,), "R(1)V(1)D(4)")
    assert packed(empty, empty, network).ways == ()


def test_trees_lead_to_one_value_part() -> None:
    network = rv.Network.preset("ring", 4)
    src, dst = rv.Layout((8,), "R(1)V(1)D(4)"), rv.Layout((8,), "R(1)V(4)D(1)")
    with pytest.raises(rv.LayoutError, match=r"trees to R\(1\)V\(4\)D\(1\)"):
        forest_of(src, dst, network)


def test_faults_are_found() -> None:
    network, _ = OPTIMA["4x2"]
    forest = packed(*collective(network, *REDUCE), network)
    ((way, share), *others) = forest.ways[0]
    (tree,) = way
    for changed, fault in (
        (replace(tree, copies=tree.copies[1:]), "gets nothing|does not have"),
        (replace(tree, copies=(*tree.copies, tree.copies[0])), "gets the element twice"),
        (replace(tree, sums=tree.sums[1:]), "no rank sends part|does not stay at the root"),
        (replace(tree, sums=(*tree.sums, tree.sums[0])), "sends its sum twice"),
        (replace(tree, root=tree.sums[0].src), "does not stay at the root"),
    ):
        wrong = replace(forest, ways=((((changed,), share), *others), *forest.ways[1:]))
        assert re.search(fault, "; ".join(wrong.faults())), wrong.faults()
    half = replace(forest, ways=(((way, Fraction(1, 2)),), *forest.ways[1:]))
    assert "shares of" in "; ".join(half.faults())
