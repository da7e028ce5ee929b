"""Laws of the bound: no plan beats it, and it equals the published values of known pairs."""

from __future__ import annotations

import random

import pytest

import rvdcomm as rv
from rvdcomm.cost import lower_bound, step_cost, total_cost
from rvdcomm.planning import RebindPricer, State, exchange_step, least_of_any, refine
from tests.oracle import all_pairs, drawn, random_pair, random_topology

SHAPE = (16, 24)
NUM_BYTES = 16 * 24
FAST, SLOW = rv.Link(0, 8.0), rv.Link(0, 1.0)
TOPOLOGIES = {
    "8": rv.Topology.single_host(8, 0, 1.0),
    "2x4": rv.Topology.hosts([range(4), range(4, 8)], FAST, SLOW),
    "4x2": rv.Topology.hosts([range(h, h + 2) for h in range(0, 8, 2)], FAST, SLOW),
    "5+3": rv.Topology.hosts([range(5), range(5, 8)], FAST, SLOW),
}
ONE_HOST = "8"
SHARE = 0.3
"""Share of the pairs for which the closed form is compared with plans on several hosts."""
FIELDS = ["secs", "wire_bytes", "host_bytes", "peak_bytes", "rounds", "recv_bytes"]


def beaten(cost: rv.Cost, bound: rv.Cost) -> list[str]:
    """Fields in which ``cost`` is below ``bound``."""
    # Seconds are sums of rounded quotients, so they may differ in the last bits.
    slack = {"secs": 1 + 1e-12}
    return [
        f"{field}: cost {getattr(cost, field)}, bound {getattr(bound, field)}"
        for field in FIELDS
        if getattr(cost, field) * slack.get(field, 1) < getattr(bound, field)
    ]


def direct_cost(src: rv.Layout, dst: rv.Layout, item_bytes: int, topology: rv.Topology) -> rv.Cost:
    """The cost of one exchange of exact overlaps; memory for staging is not counted."""
    traffic: dict[tuple[int, int], int] = {}
    (moves,) = exchange_step(State(src), State(dst)).moves(topology)
    for move in moves:
        pair = move.src_rank, move.dst_rank
        traffic[pair] = traffic.get(pair, 0) + move.box.num_elements * item_bytes
    peak_bytes = lower_bound(src, dst, item_bytes, topology).peak_bytes
    return total_cost([step_cost(traffic, topology)], peak_bytes)


# --- no plan beats the bound --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_beats_the_bound_on_random_pairs(seed: int) -> None:
    rng = random.Random(seed)
    found = []
    for _ in range(34):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        plan = rv.plan(src, dst, "int64", topology)
        found += [
            f"{src} -> {dst} on {topology.levels}: {fault}"
            for fault in beaten(plan.cost, plan.bound)
        ]
    assert found == []


@pytest.mark.many(3)
@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_no_plan_beats_the_bound_on_any_pair_of_eight_ranks(topology: rv.Topology) -> None:
    found = []
    pairs = list(all_pairs((6, 10), 8))
    # Trees take longer to find than paths.
    with_trees = set(drawn(pairs, 0.1, str(topology)))
    for src, dst in pairs:
        plan = rv.plan(src, dst, "int8", topology, trees=(src, dst) in with_trees)
        found += [f"{src.rvd} -> {dst.rvd}: {fault}" for fault in beaten(plan.cost, plan.bound)]
    assert found == []


@pytest.mark.parametrize("seed", range(4))
def test_direct_exchange_never_beats_the_bound(seed: int) -> None:
    rng = random.Random(seed)
    found = []
    for _ in range(50):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        cost, bound = direct_cost(src, dst, 4, topology), lower_bound(src, dst, 4, topology)
        found += [f"{src} -> {dst} on {topology.levels}: {f}" for f in beaten(cost, bound)]
    assert found == []


def test_a_message_has_the_latency_of_the_slowest_level_that_it_crosses() -> None:
    topology = rv.Topology.hosts([[0], [1, 2]], rv.Link(1.0, 64.0), rv.Link(0.5, 64.0))
    assert topology.latencies == (1.0, 1.0)
    src = rv.Layout((16,), "R(1)V(1)D(1)", ranks=[2])
    dst = rv.Layout((16,), "R(1)V(1)D(1)", ranks=[0])
    assert lower_bound(src, dst, 1, topology).secs == rv.plan(src, dst, "uint8", topology).cost.secs
    assert lower_bound(src, dst, 1, topology).secs == 1.0 + 16 / 64.0


# --- closed form --------------------------------------------------------------------------------


def closed_form(src: rv.Layout, dst: rv.Layout, topology: rv.Topology) -> float:
    """The closed-form bound in seconds; 0 where the pair is irregular."""
    pair = refine(src, dst, topology)
    if pair is None:
        return 0.0
    pricer = RebindPricer(pair[0].grid, topology, NUM_BYTES)
    return pricer.secs(least_of_any(pricer, pair[0].targets, pair[1].targets))


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
def test_closed_form_is_never_above_the_counted_bound_if_dst_has_no_parts(
    topology: rv.Topology,
) -> None:
    above = []
    for src, dst in all_pairs(SHAPE, 8):
        closed = closed_form(src, dst, topology)
        counted = lower_bound(src, dst, 1, topology).secs
        # Sums of parts are shared by all ports, which may not divide evenly: seconds are rounded.
        if dst.rvd.v == 1 and closed > counted * (1 + 1e-12):
            above.append(f"{src.rvd} -> {dst.rvd}: {closed}, counted {counted}")
    assert above == []


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_closed_form_is_never_above_the_cost_of_a_plan(name: str) -> None:
    topology, above = TOPOLOGIES[name], []
    for src, dst in drawn(all_pairs(SHAPE, 8), 1.0 if name == ONE_HOST else SHARE, name):
        closed, plan = closed_form(src, dst, topology), rv.plan(src, dst, "int8", topology)
        cheapest = min(plan.cost.secs, direct_cost(src, dst, 1, topology).secs)
        if closed > cheapest * (1 + 1e-12):
            above.append(f"{src.rvd} -> {dst.rvd}: {closed}, cost {cheapest}")
    assert above == []


def test_closed_form_equals_the_counted_bound_on_one_host_without_parts() -> None:
    topology = TOPOLOGIES["8"]
    apart = []
    for src, dst in all_pairs(SHAPE, 8):
        closed = closed_form(src, dst, topology)
        counted = lower_bound(src, dst, 1, topology).recv_bytes
        if src.rvd.v == dst.rvd.v == 1 and closed != counted:
            apart.append(f"{src.rvd} -> {dst.rvd}: {closed}, counted {counted}")
    assert apart == []


# --- known values -------------------------------------------------------------------------------


# Source: docs/bound.md, in whole tensors received by the busiest rank.
@pytest.mark.parametrize(
    "src, dst, tensors",
    [
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", 3 / 16),
        ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", 3 / 4),
        ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", 1.5),
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", 3 / 4),
        ("R(2)V(4)D(1,1)", "R(8)V(1)D(1,1)", 1.25),
        ("R(2)V(4)D(1,1)", "R(2)V(1)D(4,1)", 0.5),
        ("R(1)V(1)D(1,8)", "R(1)V(1)D(2,4)", 1 / 8),
        ("R(4)V(1)D(1,1)", "R(1)V(1)D(4,1)", 0),
        ("R(4)V(1)D(1,1)", "R(1)V(4)D(1,1)", 0),
    ],
)
def test_bound_of_known_pairs_in_one_group(src: str, dst: str, tensors: float) -> None:
    topology = TOPOLOGIES["8"]
    bound = lower_bound(rv.Layout(SHAPE, src), rv.Layout(SHAPE, dst), 1, topology)
    assert bound.recv_bytes == tensors * NUM_BYTES


@pytest.mark.parametrize(
    "src, dst, tensors",
    [
        # Source: docs/bound.md, "Messages in all": one more than in one group.
        ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", 7),
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", 4),
        ("R(1)V(2)D(2,1)", "R(2)V(1)D(1,2)", 3),
        ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", 4),
        ("R(4)V(1)D(1,1)", "R(1)V(1)D(4,1)", 1),
        ("R(1)V(1)D(4,1)", "R(1)V(4)D(1,1)", 1),
    ],
)
def test_bound_of_volume_between_disjoint_groups(src: str, dst: str, tensors: int) -> None:
    ends = rv.Layout(SHAPE, src), rv.Layout(SHAPE, dst, ranks=[4, 5, 6, 7])
    assert lower_bound(*ends, 1, TOPOLOGIES["8"]).wire_bytes == tensors * NUM_BYTES


@pytest.mark.parametrize(
    "src, dst, tensors",
    [
        ("R(1)V(1)D(8,1)", "R(8)V(1)D(1,1)", 1),
        ("R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)", 2),
        ("R(1)V(8)D(1,1)", "R(1)V(1)D(8,1)", 1),
        ("R(2)V(1)D(4,1)", "R(8)V(1)D(1,1)", 0),
    ],
)
def test_bound_of_bytes_between_two_hosts(src: str, dst: str, tensors: int) -> None:
    ends = rv.Layout(SHAPE, src), rv.Layout(SHAPE, dst)
    assert lower_bound(*ends, 1, TOPOLOGIES["2x4"]).host_bytes == tensors * NUM_BYTES


@pytest.mark.parametrize("seed", range(6))
def test_the_bound_by_boxes_is_never_above_that_by_masks(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(seed)
    (src, dst), topology = random_pair(rng), random_topology(rng)
    exact = lower_bound(src, dst, 1, topology)
    monkeypatch.setattr("rvdcomm.cost.bound.MAX_MASK_ELEMENTS", 0)
    assert beaten(exact, lower_bound(src, dst, 1, topology)) == []


def test_the_bound_of_thousands_of_irregular_ranks_is_that_of_their_boxes() -> None:
    odd = range(1, 4620, 2)
    texts = ("R(1)V(1)D(2310,1)", "R(1)V(1)D(1,2310)")
    src, dst = (rv.Layout((4620, 4620), text, odd) for text in texts)
    found = lower_bound(src, dst, 1, rv.Topology.single_host(4620, 0, 1.0))
    # A rank has 2 rows and wants 2 columns, of which it has 4 elements.
    assert found.recv_bytes == 2 * 4620 - 4


def test_bound_of_time_is_that_of_the_slowest_level() -> None:
    ends = rv.Layout(SHAPE, "R(1)V(1)D(8,1)"), rv.Layout(SHAPE, "R(8)V(1)D(1,1)")
    # Half a tensor enters each host at 1 byte/s, and 7/8 of a tensor enter each rank at 8 bytes/s.
    assert lower_bound(*ends, 1, TOPOLOGIES["2x4"]).secs == NUM_BYTES / 2


def test_bound_of_time_has_one_alpha_of_the_farthest_level() -> None:
    topology = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(5.0, 8.0), rv.Link(7.0, 1.0))
    ends = rv.Layout(SHAPE, "R(1)V(1)D(8,1)"), rv.Layout(SHAPE, "R(8)V(1)D(1,1)")
    assert lower_bound(*ends, 1, topology).secs == 7.0 + NUM_BYTES / 2


def test_bound_of_memory_is_the_sum_of_both_shards() -> None:
    ends = rv.Layout(SHAPE, "R(1)V(1)D(8,1)"), rv.Layout(SHAPE, "R(8)V(1)D(1,1)")
    assert lower_bound(*ends, 2, TOPOLOGIES["8"]).peak_bytes == 2 * (NUM_BYTES // 8 + NUM_BYTES)


def test_bound_of_equal_layouts_is_zero_except_memory() -> None:
    layout = rv.Layout(SHAPE, "R(1)V(2)D(4,1)")
    shard = NUM_BYTES // 4
    assert lower_bound(layout, layout, 1, TOPOLOGIES["2x4"]) == rv.Cost(0.0, 0, 0, 2 * shard, 0, 0)
