"""Laws of the port model: busiest port, shared NICs, full duplex, alpha of the farthest level."""

from __future__ import annotations

import random

import pytest

import rvdcomm as rv
from rvdcomm.cost import StepCost, step_cost, total_cost
from tests.oracle import WORLD, random_topology

ALPHA, BETA = 2.0**-10, 2.0**20
"""Powers of two, so that sums of seconds are exact."""
ONE_HOST = rv.Topology.single_host(8, ALPHA, BETA)
NIC_ALPHA, NIC_BETA = 2.0**-6, 2.0**18
TWO_HOSTS = rv.Topology.hosts(
    [range(4), range(4, 8)], rv.Link(ALPHA, BETA), rv.Link(NIC_ALPHA, NIC_BETA)
)
RACKS = rv.Topology(
    (
        *rv.Topology.hosts([[0], [1], [2], [3]], rv.Link(0, BETA), rv.Link(0, BETA)).levels,
        rv.Level("rack", ((0, 1), (2, 3)), rv.Link(1.0, 2.0)),
    )
)


# --- time ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "traffic, secs",
    [
        ({(0, 1): 1024}, ALPHA + 1024 / BETA),
        ({(0, 1): 1024, (1, 0): 1024}, ALPHA + 1024 / BETA),
        ({(0, 1): 1024, (2, 3): 512}, ALPHA + 1024 / BETA),
        ({(0, 1): 1024, (0, 2): 512}, 2 * ALPHA + 1536 / BETA),
        ({(1, 0): 1024, (2, 0): 512}, 2 * ALPHA + 1536 / BETA),
        ({(0, 1): 512, (1, 2): 512, (2, 0): 512}, ALPHA + 512 / BETA),
    ],
    ids=["one message", "full duplex", "ports apart", "out of a port", "into a port", "ring"],
)
def test_time_is_alpha_times_rounds_plus_the_time_of_the_busiest_port(
    traffic: dict[tuple[int, int], int], secs: float
) -> None:
    assert step_cost(traffic, ONE_HOST).secs == secs


def test_messages_of_one_host_share_its_nic() -> None:
    traffic = {(rank, rank + 4): 1024 for rank in range(4)}
    assert step_cost(traffic, TWO_HOSTS).secs == NIC_ALPHA + 4 * 1024 / NIC_BETA


def test_nic_is_full_duplex() -> None:
    traffic = {(0, 4): 1024, (5, 1): 1024}
    assert step_cost(traffic, TWO_HOSTS).secs == NIC_ALPHA + 1024 / NIC_BETA


def test_bytes_inside_hosts_do_not_pass_the_nic() -> None:
    assert step_cost({(0, 1): 1024, (4, 5): 1024}, TWO_HOSTS).secs == ALPHA + 1024 / BETA


def test_rank_ports_also_limit_messages_between_hosts() -> None:
    fast_nic = rv.Topology.hosts([[0], [1]], rv.Link(0, 8.0), rv.Link(0, 64.0))
    assert step_cost({(0, 1): 1024}, fast_nic).secs == 128


def test_alpha_is_that_of_the_farthest_level() -> None:
    traffic = {(0, 1): 1024, (0, 2): 1024, (3, 4): 1}
    assert step_cost(traffic, TWO_HOSTS).secs == 2 * NIC_ALPHA + 2048 / BETA


def test_third_level_has_separate_ports() -> None:
    assert step_cost({(0, 2): 16, (1, 3): 16}, RACKS).secs == 1.0 + 32 / 2.0


# --- counts -------------------------------------------------------------------------------------

TRAFFIC = {(0, 0): 999, (0, 1): 10, (0, 4): 20, (5, 1): 30, (6, 7): 40, (2, 3): 0}


def test_bytes_between_ranks_and_hosts_and_the_partners_of_the_busiest_rank_are_counted() -> None:
    cost = step_cost(TRAFFIC, TWO_HOSTS)
    assert (cost.wire_bytes, cost.host_bytes, cost.rounds) == (100, 50, 2)
    assert cost.recv_bytes == {1: 40, 4: 20, 7: 40}
    # Between racks once.
    assert step_cost({(0, 1): 5, (0, 2): 7}, RACKS).host_bytes == 12


def test_given_rounds_replace_the_counted_rounds() -> None:
    cost = step_cost({(0, 1): 1024}, ONE_HOST, rounds=6)
    assert (cost.rounds, cost.secs) == (6, 6 * ALPHA + 1024 / BETA)


@pytest.mark.parametrize("traffic", [{}, {(0, 0): 1024}, {(0, 1): 0}], ids=["none", "own", "empty"])
def test_step_that_sends_nothing_costs_nothing(traffic: dict[tuple[int, int], int]) -> None:
    assert step_cost(traffic, ONE_HOST, rounds=3) == StepCost(0.0, 0, 0, 0, {})


@pytest.mark.parametrize("seed", range(6))
def test_reversed_traffic_takes_equal_time(seed: int) -> None:
    rng = random.Random(seed)
    topology = random_topology(rng)
    traffic = {
        (rng.randrange(WORLD), rng.randrange(WORLD)): rng.randrange(10**6) for _ in range(40)
    }
    back = {(b, a): num_bytes for (a, b), num_bytes in traffic.items()}
    assert step_cost(back, topology).secs == step_cost(traffic, topology).secs


@pytest.mark.parametrize("seed", range(30))
def test_a_step_costs_the_same_on_a_topology_and_on_its_network(seed: int) -> None:
    rng = random.Random(seed)
    topology = random_topology(rng)
    traffic = {
        (a, b): rng.randrange(10**6)
        for a, b in ((rng.randrange(WORLD), rng.randrange(WORLD)) for _ in range(40))
        if a != b
    }
    found, network = step_cost(traffic, topology), rv.Network.of(topology)
    assert step_cost(traffic, network).secs == pytest.approx(found.secs, rel=1e-12)
    assert step_cost(traffic, network).host_bytes == found.host_bytes
    # The same routes, found by Dijkstra's algorithm instead of in the tree.
    spelled = rv.Network(network.wires, network.switches)
    spelled.__dict__["above"] = {}
    assert step_cost(traffic, spelled).secs == pytest.approx(found.secs, rel=1e-12)


def test_messages_share_the_wires_of_their_routes() -> None:
    line = rv.Network.preset("line", 4, link=rv.Link(1.0, 100.0))
    # Rank 1 to 3 passes rank 2, and shares its last wire with the message of rank 2.
    assert step_cost({(1, 3): 300, (2, 3): 200}, line, 1).secs == 5.0 + 2.0
    assert step_cost({(1, 3): 300, (3, 1): 200}, line, 2).secs == 3.0 + 2 * 2.0
    assert step_cost({(1, 3): 300}, line).wire_bytes == 300


def test_routes_prefer_wires_to_other_ranks_and_near_wires_to_far_ones() -> None:
    network = rv.Network.parse(
        """
        0:2 <-> near  1 us  1 GB/s
        0:3 <-> far   9 us  8 GB/s
        0 <-> 2       5 us  1 KB/s
        """
    )

    def nodes(src: int, dst: int) -> list[object]:
        return [network.wires[i].dst for i in network.routes.of(src, dst).wires]

    assert nodes(0, 1) == ["near", 1]
    assert nodes(0, 2) == [2]
    assert nodes(1, 2) == ["far", 2]
    assert nodes(2, 2) == []
    assert network.routes.of(1, 2).alpha_secs == 9e-6


# --- plans --------------------------------------------------------------------------------------

STEPS = [StepCost(0.5, 100, 10, 3, {0: 60, 1: 40}), StepCost(0.25, 50, 0, 1, {1: 50})]


@pytest.mark.parametrize(
    "field, total",
    [
        ("secs", 0.75),
        ("wire_bytes", 150),
        ("host_bytes", 10),
        ("peak_bytes", 777),
        ("rounds", 4),
        # Rank 1 receives 40 and 50 bytes. The busiest rank of the first step is rank 0.
        ("recv_bytes", 90),
    ],
)
def test_total_cost_adds_up_the_steps(field: str, total: float) -> None:
    assert getattr(total_cost(STEPS, 777), field) == total
