"""Laws of the cheapest ways: no way costs less, by trying all on few ranks."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest

import rvdcomm as rv
from rvdcomm.cost import Demand
from rvdcomm.synthesis.cheapest import (
    Chains,
    Hops,
    Prices,
    arborescence,
    cheapest_into,
    cheapest_way,
    is_exact,
    trees_from_each,
)
from rvdcomm.synthesis.forest import faults_of, loads_of
from tests.network.oracle import random_network


def random_hops(rng: random.Random, count: int) -> np.ndarray:
    """[src, dst]: prices; some hops are missing, but all nodes reach all others."""
    hop = np.array([[float(rng.randint(1, 9)) for _ in range(count)] for _ in range(count)])
    for a in range(count):
        for b in range(count):
            if (b - a) % count != 1 and rng.random() < 0.4:
                hop[a, b] = np.inf
    np.fill_diagonal(hop, 0.0)
    return hop


def cheapest_reach(hop: np.ndarray, roots: set[int], groups: list[set[int]]) -> float:
    """The least price at which each group is reached from a root, by trying all parents."""
    count = len(hop)
    others = [node for node in range(count) if node not in roots]
    best = np.inf
    for parents in product(range(-1, count), repeat=len(others)):
        chosen = {n: p for n, p in zip(others, parents, strict=True) if p >= 0}
        price = sum(hop[p, n] for n, p in chosen.items())
        if price >= best:
            continue
        reached = set(roots)
        while more := {n for n, p in chosen.items() if p in reached} - reached:
            reached |= more
        if all(reached & group for group in groups):
            best = price
    return best


@pytest.mark.parametrize("seed", range(30))
def test_no_tree_to_groups_of_nodes_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    hop = random_hops(rng, 5)
    groups = [set(rng.sample(range(5), rng.randint(1, 2))) for _ in range(rng.randint(1, 4))]
    trees = trees_from_each(Chains.of(hop), [sorted(group) for group in groups])
    assert trees is not None
    for root in range(5):
        expected = cheapest_reach(hop, {root}, groups)
        assert trees.costs[-1, root] == pytest.approx(expected)
        edges = set(trees.edges(-1, root))
        assert sum(hop[edge] for edge in edges) <= expected + 1e-9
        reached = {root}
        while more := {b for a, b in edges if a in reached} - reached:
            reached |= more
        assert all(reached & group for group in groups)


@pytest.mark.parametrize("seed", range(30))
def test_no_tree_to_all_nodes_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    hop = random_hops(rng, 5)
    roots = rng.sample(range(5), rng.randint(1, 2))
    cost, edges = arborescence(Chains.of(hop), roots, range(5))
    assert cost == cheapest_reach(hop, set(roots), [{node} for node in range(5)])
    assert sorted({*roots, *(b for _, b in edges)}) == list(range(5))


@pytest.mark.parametrize("seed", range(40))
def test_edges_into_nodes_are_a_tree(seed: int) -> None:
    rng = random.Random(seed)
    count = rng.randint(2, 12)
    cost = random_hops(rng, count) + np.eye(count) * 1e9
    cost[np.isinf(cost)] = 1e6
    into = cheapest_into(cost)
    for node in range(1, count):
        passed = 0
        while node:
            node, passed = into[node], passed + 1
            assert passed < count


def priced(rng: random.Random, network: rv.Network) -> tuple[Prices, np.ndarray]:
    prices = np.array([float(rng.choice([0, 1, 1, 2, 5, 9])) for _ in network.wires])
    return Hops(network.wires, network.ranks).priced(prices), prices


@pytest.mark.parametrize("seed", range(30))
def test_hops_take_the_cheapest_way_through_switches(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(4))
    found, prices = priced(rng, network)
    for (a, b), wires in found.wires.items():
        assert sum(prices[i] for i in wires) == pytest.approx(found.hop[a, b], abs=1e-6)
        nodes = [network.wires[wires[0]].src, *(network.wires[i].dst for i in wires)]
        assert nodes[0] == a
        assert nodes[-1] == b
        assert all(network.wires[i].src == node for i, node in zip(wires, nodes, strict=False))
        assert all(isinstance(node, str) for node in nodes[1:-1])


@pytest.mark.parametrize("seed", range(60))
def test_ways_serve_their_demand_and_none_of_one_part_is_cheaper(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(2, 5)))
    found, prices = priced(rng, network)
    groups = [
        frozenset(rng.sample(network.ranks, rng.randint(1, len(network.ranks))))
        for _ in range(rng.choice([2, 2, 3, 4]))
    ]
    demand = Demand(7, tuple(groups[:-1]), groups[-1])
    cost, way = cheapest_way(demand, found)
    assert faults_of(way, demand) == []
    assert is_exact(demand, network.ranks)
    paid = sum(prices[wire] * count for wire, count in loads_of(way).items())
    assert paid <= cost + 1e-6
    if len(demand.parts) == 1:
        readers = [{r} for r in demand.readers]
        expected = cheapest_reach(found.hop, set(demand.parts[0]), readers)
        assert cost == pytest.approx(expected, abs=1e-6)
    elif len(demand.readers) == 1:
        (reader,) = demand.readers
        expected = cheapest_reach(found.hop.T, {reader}, [set(part) for part in demand.parts])
        assert cost == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_many_readers_and_parts_are_served_too(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(10))
    everybody = frozenset(network.ranks)
    some = frozenset(rng.sample(network.ranks, 8))
    singles = tuple(frozenset({rank}) for rank in network.ranks)
    found, prices = priced(rng, network)
    for demand, exact in (
        (Demand(1, (frozenset({3}),), everybody), True),
        (Demand(1, (everybody - some,), some), True),
        (Demand(1, (frozenset({3}),), some), len(some | {3}) == 10),
        (Demand(1, singles, frozenset({4})), True),
        (Demand(1, singles, everybody), True),
        (Demand(1, singles, some), False),
        (Demand(1, singles[:8], everybody), False),
    ):
        cost, way = cheapest_way(demand, found)
        assert faults_of(way, demand) == []
        assert is_exact(demand, network.ranks) == exact
        paid = sum(prices[wire] * count for wire, count in loads_of(way).items())
        assert paid <= cost + 1e-6


def test_replicas_of_parts_are_summed_near_their_readers() -> None:
    """Two hosts have both parts: each sums its own, and nothing crosses the slow wires."""
    network = rv.Network.parse("0 <-> 1  1 us 1 GB/s\n2 <-> 3  1 us 1 GB/s\n1 <-> 2  1 us 1 MB/s")
    demand = Demand(1, (frozenset({0, 2}), frozenset({1, 3})), frozenset({0, 3}))
    prices = Hops(network.wires, network.ranks).priced(
        np.array([1 / wire.link.bytes_per_sec for wire in network.wires])
    )
    _, way = cheapest_way(demand, prices)
    assert sorted(tree.root for tree in way) in ([0, 3], [0, 2], [1, 2], [1, 3])
    passed = {(network.wires[i].src, network.wires[i].dst) for i in loads_of(way)}
    assert not passed & {(1, 2), (2, 1)}
