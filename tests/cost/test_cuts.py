"""Laws of the flow bound: known optima, all cuts by definition, and the bound of levels."""

from __future__ import annotations

import random
from itertools import combinations

import numpy as np
import pytest
from hypothesis import given, settings
from scipy.optimize import linprog

import rvdcomm as rv
from rvdcomm.cost import flow_bound, lower_bound
from rvdcomm.cost.cuts import wires_of_members
from rvdcomm.cost.demands import demands_of
from rvdcomm.network import shapes
from tests.network.oracle import random_network
from tests.oracle import random_layout, random_pair, random_topology
from tests.strategies import seeds

MIB = 1 << 20


def link(gigabytes_per_sec: float) -> rv.Link:
    return rv.Link(0.0, gigabytes_per_sec * 1e9)


def hosts(num_hosts: int, size: int) -> list[range]:
    return [range(first, first + size) for first in range(0, num_hosts * size, size)]


def collective(network: rv.Network, src: str, dst: str) -> tuple[rv.Layout, rv.Layout]:
    count = len(network.ranks)
    shape = (count * MIB,)
    return tuple(rv.Layout(shape, text.format(n=count), network.ranks) for text in (src, dst))


GATHER = "R(1)V(1)D({n})", "R({n})V(1)D(1)"
SCATTER = "R(1)V({n})D(1)", "R(1)V(1)D({n})"
REDUCE = "R(1)V({n})D(1)", "R({n})V(1)D(1)"

# Bytes of the whole tensor a second at best, in GB/s: published by ForestColl (2402.06787) and
# TE-CCL (2305.13479), or what their definition gives.
OPTIMA = {
    "1x8": (rv.Network.hosts(hosts(1, 8), link(300), link(1)), 342.857),
    "2x8, a NIC for a rank": (rv.Network.hosts(hosts(2, 8), link(300), link(25), 1), 346.667),
    "2x8, a NIC for a host": (rv.Network.hosts(hosts(2, 8), link(300), link(25)), 50.0),
    "4x2": (rv.Network.hosts(hosts(4, 2), link(2), link(1)), 4 / 3),
    "dgx-1": (rv.Network.preset("dgx-1"), 171.429),
    "dgx-2 x 2": (rv.Network.preset("dgx-2", 2), 129.032),
    "ndv2 x 2": (rv.Network.preset("ndv2", 2), 25.0),
    "ndv2 x 4": (rv.Network.preset("ndv2", 4), 50 / 3),
    "mi250 x 2": (rv.Network.preset("mi250", 2), 354.133),
    "dgx-a100 x 2": (rv.Network.preset("dgx-a100-rails", 2), 346.667),
    "torus": (rv.Network.preset("torus", 4, 4, link=link(1)), 4.26667),
    "mesh": (rv.Network.preset("mesh", 4, 4, link=link(1)), 2.13333),
    "line": (shapes.line([link(4), link(1), link(4)]), 2.0),
}


@pytest.mark.parametrize("name", OPTIMA)
@pytest.mark.parametrize("layouts", [GATHER, SCATTER])
def test_bound_of_a_gather_and_its_reverse_is_the_published_optimum(name, layouts) -> None:
    network, gigabytes_per_sec = OPTIMA[name]
    src, dst = collective(network, *layouts)
    secs = flow_bound(src, dst, 1, network).secs
    assert src.shape[0] / secs / 1e9 == pytest.approx(gigabytes_per_sec, rel=1e-5)


@pytest.mark.parametrize("name", ["1x8", "2x8, a NIC for a host", "4x2", "ndv2 x 2"])
def test_an_all_reduce_takes_as_long_as_both_where_all_messages_say_so(name: str) -> None:
    network, gigabytes_per_sec = OPTIMA[name]
    src, dst = collective(network, *REDUCE)
    secs = flow_bound(src, dst, 1, network).secs
    assert src.shape[0] / secs / 1e9 == pytest.approx(gigabytes_per_sec / 2, rel=1e-5)


# --- against definitions -----------------------------------------------------------------------


def slowest_cut(src: rv.Layout, dst: rv.Layout, network: rv.Network) -> float:
    """The largest time of a cut, element by element and set by set."""
    wires = wires_of_members(network, {*src.ranks, *dst.ranks})
    nodes = sorted({end for wire in wires for end in (wire.src, wire.dst)}, key=str)
    found = 0.0
    for size in range(1, len(nodes)):
        for inside in map(set, combinations(nodes, size)):
            rate = sum(
                wire.link.bytes_per_sec
                for wire in wires
                if wire.dst in inside and wire.src not in inside
            )
            enters = sum(
                demand.num_elements
                for demand in demands_of(src, dst)
                if inside & demand.readers and any(not inside & held for held in demand.parts)
            )
            found = max(found, enters / rate if enters else 0.0)
    return found


@settings(max_examples=60)
@given(seeds)
def test_bound_of_a_small_network_is_at_least_that_of_every_cut(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(2, 5)))
    ranks = [rng.sample(network.ranks, rng.randint(1, len(network.ranks))) for _ in range(2)]
    src, dst = (random_layout(rng, (12, 10), each) for each in ranks)
    bound = flow_bound(src, dst, 4, network)
    if dst.rvd.v > 1:
        assert bound.secs == 0
        return
    cuts = 4 * slowest_cut(src, dst, network)
    assert bound.secs >= cuts * (1 - 1e-9)
    if bound.cut:
        assert bound.secs == pytest.approx(cuts)


def fractional_gather(network: rv.Network, num_bytes: int) -> float:
    """The least time of an all-gather by a linear program: each rank's flows fit in rate x time.

    That trees reach it is Edmonds' theorem.
    """
    wires, ranks = network.wires, network.ranks
    share = num_bytes / len(ranks)
    secs = 0.0
    for reader in ranks:
        # Variables: a flow for each wire, then the time.
        rows, wanted = [], []
        for node in network.nodes:
            row = [(wire.src == node) - (wire.dst == node) for wire in wires]
            rows.append([*map(float, row), 0.0])
            others = share * (len(ranks) - 1)
            wanted.append(-others if node == reader else share * isinstance(node, int))
        limits = np.hstack(
            [np.eye(len(wires)), -np.array([[wire.link.bytes_per_sec] for wire in wires])]
        )
        found = linprog(
            [0.0] * len(wires) + [1.0],
            A_ub=limits, b_ub=np.zeros(len(wires)), A_eq=np.array(rows), b_eq=wanted,
        )  # fmt: skip
        secs = max(secs, found.fun)
    return secs


@settings(max_examples=30)
@given(seeds)
def test_bound_of_an_all_gather_is_that_of_the_linear_program(seed: int) -> None:
    network = random_network(random.Random(seed), range(2 + seed % 5))
    src, dst = collective(network, *GATHER)
    # Rates of the order of 1, for the solver.
    scaled = rv.Network(
        tuple(
            rv.Wire(wire.src, wire.dst, rv.Link(0.0, wire.link.bytes_per_sec / 1e9))
            for wire in network.wires
        )
    )
    expected = fractional_gather(scaled, src.shape[0]) / 1e9
    found = flow_bound(src, dst, 1, network)
    assert found.secs == pytest.approx(expected, rel=1e-6)


@settings(max_examples=60)
@given(seeds)
def test_bound_is_at_least_that_of_the_levels_of_a_topology(seed: int) -> None:
    rng = random.Random(seed)
    src, dst = random_pair(rng)
    topology = random_topology(rng)
    free = rv.Topology(
        tuple(
            rv.Level(level.name, level.groups, rv.Link(0.0, level.link.bytes_per_sec))
            for level in topology.levels
        )
    )
    bound = flow_bound(src, dst, 4, rv.Network.of(free))
    if dst.rvd.v == 1:
        # A port carries whole elements; the average of all messages may be a part of one.
        rates = [level.link.bytes_per_sec for level in free.levels]
        assert bound.secs >= lower_bound(src, dst, 4, free).secs - 4 / min(rates)


def test_wires_of_ranks_outside_the_call_fall_away() -> None:
    square = rv.Network.preset("ring", 4, link=link(1))
    src, dst = rv.Layout((MIB,), "R(1)V(1)D(1)", [0]), rv.Layout((MIB,), "R(2)V(1)D(1)", [0, 1])
    assert flow_bound(src, dst, 1, square).secs == pytest.approx(MIB / 1e9)
    # Without ranks 1 and 3, rank 0 does not reach rank 2: then they forward as switches do.
    far = rv.Layout((MIB,), "R(2)V(1)D(1)", [0, 2])
    assert flow_bound(src, far, 1, square).secs == pytest.approx(MIB / 2e9)


def test_a_switch_that_adds_needs_fewer_messages() -> None:
    text = "0:8 <-> nvls  0 s  300 GB/s"
    plain, adding = rv.Network.parse(text), rv.Network.parse(f"switch nvls multicasts adds\n{text}")
    src, dst = collective(plain, *REDUCE)
    whole = src.shape[0] / 300e9
    assert flow_bound(src, dst, 1, plain).secs == pytest.approx(2 * 7 / 8 * whole)
    assert flow_bound(src, dst, 1, adding).secs == pytest.approx(whole)


def test_a_bound_says_which_cut_it_is_of() -> None:
    network = rv.Network.hosts(hosts(2, 4), link(100), link(1))
    src, dst = collective(network, *GATHER)
    bound = flow_bound(src, dst, 1, network)
    assert bound.why == "into ranks 0:4 together"
    assert bound.cut == (0, 1, 2, 3, "host0")
    assert flow_bound(*collective(network, *SCATTER), 1, network).why.startswith("into ranks")
    assert flow_bound(src, src, 1, network) == rv.cost.FlowBound(0.0)


def test_ranks_outside_the_network_are_refused() -> None:
    network = rv.Network.preset("ring", 4)
    with pytest.raises(rv.LayoutError, match=r"ranks \[4\] are not in the network"):
        flow_bound(
            rv.Layout((4,), "R(1)V(1)D(1)", [4]), rv.Layout((4,), "R(4)V(1)D(1)"), 1, network
        )
