"""Wires and ports: costs equal those of rvdcomm, and a link serves one call at a time."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rvdcomm as rv
from bench.rvd.methods import point_to_point_traffic
from superscaler_core.cost import TICKS_PER_SEC, CommCosts, topology_for
from superscaler_core.materialize import Transfer
from superscaler_core.simulator.busy_ports import BusyPorts
from tests.oracle import all_rvds

SHAPE = (24, 20)
PAIRS = [
    ("R(1)V(1)D(8,1)", "R(8)V(1)D(1,1)"),
    ("R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)"),
    ("R(1)V(8)D(1,1)", "R(1)V(1)D(8,1)"),
    ("R(1)V(1)D(8,1)", "R(1)V(1)D(2,4)"),
    ("R(2)V(2)D(2,1)", "R(1)V(1)D(4,2)"),
    ("R(1)V(1)D(8,1)", "R(1)V(1)D(3,1)"),
]
TOPOLOGIES = {
    "one host": rv.Topology.single_host(8, 5e-6, 200e9),
    "two hosts": rv.Topology.preset("v100", 2, 4),
    "three levels": rv.Topology.preset("v100", 2, 2, 2),
}
WHERE = [(where, *pair) for where, pair in zip([*TOPOLOGIES] * 2, PAIRS, strict=True)]


def transfer(src: str, dst: str, shape: tuple[int, ...] = SHAPE) -> Transfer:
    rvd = rv.RVD(dst)
    num_dst = rvd.r * rvd.v * prod(rvd.d)
    layouts = rv.Layout(shape, src, range(8)), rv.Layout(shape, dst, range(num_dst))
    return Transfer(rv.Box.of_shape(shape), *layouts, "float32")


@pytest.mark.parametrize(("where", "src", "dst"), WHERE)
def test_wire_cost_equals_the_cost_of_its_plan(where: str, src: str, dst: str) -> None:
    topology, sub_transfer = TOPOLOGIES[where], transfer(src, dst)
    comm, cost = CommCosts(topology).of([sub_transfer], "rvd"), sub_transfer.plan(topology).cost
    assert comm.ticks == pytest.approx(cost.secs * TICKS_PER_SEC, rel=1e-9, abs=1)
    assert sum(comm.level_bytes) == cost.wire_bytes
    assert sum(comm.level_bytes[1:]) == cost.host_bytes


@pytest.mark.parametrize("where", TOPOLOGIES)
def test_wire_costs_of_many_sizes_and_layouts_equal_their_plans(where: str) -> None:
    """One ``CommCosts`` prices all transfers. Paths that differ only in sizes share their moves."""
    topology, rvds = TOPOLOGIES[where], all_rvds(8, 2)
    comm_costs = CommCosts(topology)
    pairs = Random(0).sample(list(product(rvds, rvds)), 25)
    sub_transfers = [
        Transfer(rv.Box.of_shape(shape), rv.Layout(shape, a), rv.Layout(shape, b), "float32")
        for a, b in [*pairs, (rv.RVD("R(1)V(8)D(1,1)"), rv.RVD("R(8)V(1)D(1,1)"))]
        for shape in ((24, 16), (16, 48), (7, 10))
    ]
    costs = [sub_transfer.plan(topology).cost for sub_transfer in sub_transfers]
    made = [comm_costs.of([sub_transfer], "rvd") for sub_transfer in sub_transfers]
    assert [comm.ticks for comm in made] == pytest.approx([1e12 * c.secs for c in costs], abs=1)
    assert [sum(comm.level_bytes) for comm in made] == [cost.wire_bytes for cost in costs]
    secs = [comm_costs.secs(sub_transfer, "rvd").secs for sub_transfer in sub_transfers]
    assert secs == pytest.approx([cost.secs for cost in costs], rel=1e-12)


@pytest.mark.parametrize(
    ("num", "src", "dst"),
    [
        (20001, "R(1)V(8)D(1)", "R(8)V(1)D(1)"),
        (20001, "R(1)V(4)D(2)", "R(8)V(1)D(1)"),
        (200001, "R(2)V(4)D(1)", "R(8)V(1)D(1)"),
    ],
)
def test_paths_of_uneven_shards_of_other_dtypes_have_their_own_costs(
    num: int, src: str, dst: str
) -> None:
    """The fastest path depends on the bytes; one ``CommCosts`` prices all of them."""
    topology = rv.Topology.hosts(
        [range(4), range(4, 8)], intra=rv.Link(5e-6, 120e9), inter=rv.Link(1.5e-5, 11e9)
    )
    layouts = [rv.Layout((num,), text) for text in (src, dst)]
    pairs = [
        Transfer(rv.Box.of_shape((num,)), *layouts, dtype)
        for dtype in ("float16", "float64", "float16", "float32")
    ]
    kinds = {tuple(s.kind for s in each.plan(topology).path.steps) for each in pairs}
    assert len(kinds) > 1
    shared = CommCosts(topology)
    for each in pairs:
        cost = each.plan(topology).cost
        assert shared.of([each], "rvd").ticks == pytest.approx(1e12 * cost.secs, rel=1e-6)


@pytest.mark.parametrize(("where", "src", "dst"), WHERE)
def test_point_to_point_bytes_equal_those_of_the_benchmark(where: str, src: str, dst: str) -> None:
    sub_transfer = transfer(src, dst)
    comm = CommCosts(TOPOLOGIES[where]).of([sub_transfer], "p2p")
    traffic = point_to_point_traffic(sub_transfer.src, sub_transfer.dst, 4)
    assert sum(comm.level_bytes) == sum(traffic.values())


@pytest.mark.parametrize("method", ["rvd", "p2p"])
@pytest.mark.parametrize(("where", "src", "dst"), WHERE)
def test_no_port_is_busy_for_longer_than_the_call(
    method: str, where: str, src: str, dst: str
) -> None:
    comm = CommCosts(TOPOLOGIES[where]).of([transfer(src, dst)], method)
    assert all(0 < busy <= comm.ticks for _, busy in comm.ports)


def test_many_tensors_of_one_call_pay_its_latency_once() -> None:
    topology, sub_transfer = TOPOLOGIES["two hosts"], transfer(*PAIRS[1])
    one, three = (CommCosts(topology).of([sub_transfer] * count, "rvd") for count in (1, 3))
    latency = one.ticks - (three.ticks - one.ticks) / 2
    assert three.ticks < 3 * one.ticks
    # Three rounds inside hosts of 5 us, and one between them of 15 us, in picoseconds.
    assert latency == pytest.approx(30e6, abs=2)
    assert [3 * busy for _, busy in one.ports] == pytest.approx([b for _, b in three.ports], abs=2)


def test_wire_cost_of_128_ranks_is_near_the_cost_of_their_plan() -> None:
    topology = rv.Topology.preset("v100", 16, 8)
    layouts = (
        rv.Layout((1 << 20,), rvd, range(128)) for rvd in ("R(1)V(128)D(1)", "R(128)V(1)D(1)")
    )
    sub_transfer = Transfer(rv.Box.of_shape((1 << 20,)), *layouts, "float16")
    comm, cost = CommCosts(topology).of([sub_transfer], "rvd"), sub_transfer.plan(topology).cost
    assert comm.ticks == pytest.approx(cost.secs * TICKS_PER_SEC, rel=0.01)
    assert sum(comm.level_bytes) == cost.wire_bytes
    assert comm.level_bytes[1] == cost.host_bytes
    assert all(0 < busy <= comm.ticks for _, busy in comm.shared)
    assert len(comm.shared) == 2 * 16


def test_hosts_of_a_large_transfer_send_or_receive() -> None:
    """The transfer is between two groups of 48 ranks, so no host does both."""
    ends = [range(48), range(48, 96)]
    layouts = (rv.Layout((48, 1 << 14), "R(1)V(1)D(48,1)", ranks) for ranks in ends)
    sub_transfer = Transfer(rv.Box.of_shape((48, 1 << 14)), *layouts, "float16")
    comm_costs = CommCosts(rv.Topology.preset("v100", 12, 8))
    assert not sub_transfer.plan(rv.Topology.preset("v100", 12, 8)).is_counted
    planned, pulled = comm_costs.of([sub_transfer], "rvd"), comm_costs.of([sub_transfer], "p2p")
    assert planned.shared == pulled.shared
    assert len(planned.shared) == 12
    assert planned.ticks == pytest.approx(pulled.ticks, rel=1e-9)


def test_default_topology_equals_the_one_that_plans_use() -> None:
    sub_transfer = transfer(*PAIRS[0])
    assert sub_transfer.plan(topology_for(None, range(8))).cost == sub_transfer.plan(None).cost


# --- ports --------------------------------------------------------------------------------------

PORT = (1, 0, "out")
calls = st.lists(st.tuples(st.integers(0, 60), st.integers(1, 20), st.integers(0, 9)), max_size=12)


@given(calls)
def test_port_does_all_its_work_without_overlap(calls: list[tuple[int, int, int]]) -> None:
    ports = BusyPorts()
    for start, work, besides in calls:
        end = ports.reserve(start, work + besides, [(PORT, work)])
        assert end >= start + work + besides
    busy = sorted(interval for _, interval in ports.taken)
    assert all(a[1] <= b[0] for a, b in pairwise(busy))
    assert sum(end - start for start, end in busy) == sum(work for _, work, _ in calls)


@given(calls, st.integers(0, 80))
def test_background_of_ports_determines_later_reservations(
    calls: list[tuple[int, int, int]], moment: int
) -> None:
    ports = BusyPorts()
    for start, work, besides in calls:
        ports.reserve(start, work + besides, [(PORT, work)])
    later = BusyPorts(ports.background([PORT], moment))
    assert later.reserve(3, 7, [(PORT, 5)]) == ports.reserve(3 + moment, 7, [(PORT, 5)]) - moment


def test_port_fills_free_time_between_reservations() -> None:
    ports = BusyPorts()
    ports.reserve(10, 10, [(PORT, 10)])
    assert ports.reserve(5, 8, [(PORT, 8)]) == 23
    assert [interval for _, interval in ports.taken] == [(10, 20), (5, 10), (20, 23)]


@pytest.mark.parametrize(("src", "dst"), PAIRS[:3])
def test_flat_ring_crosses_each_nic_once_and_is_not_faster_than_the_plan(
    src: str, dst: str
) -> None:
    """8 ranks on 2 hosts send 7/8 of the tensor through every NIC, and twice that for a sum."""
    shape = (2400, 2000)  # large, so that latency is negligible
    topology, sub_transfer = TOPOLOGIES["two hosts"], transfer(src, dst, shape)
    comm_costs = CommCosts(topology)
    ring = comm_costs.of([sub_transfer], "ring")
    sub_transfers = 2 if (src, dst) == PAIRS[1] else 1
    num_bytes = 7 * prod(shape) * 4 // 8
    assert ring.level_bytes[1] == 2 * sub_transfers * num_bytes
    out = dict(ring.ports)[1, 0, "out"] / TICKS_PER_SEC
    assert out == pytest.approx(
        sub_transfers * num_bytes / topology.levels[1].link.bytes_per_sec, rel=1e-6
    )
    assert comm_costs.of([sub_transfer], "rvd").ticks <= ring.ticks
