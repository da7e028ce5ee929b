"""Plans on networks: the same data, a cost by wires, and a bound that no plan beats."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest

import rvdcomm as rv
from rvdcomm.cost import step_cost
from rvdcomm.plans import plan_with, planner
from tests.network.oracle import random_network
from tests.oracle import parts_of, random_layout, reassembled, shards_of
from tests.plans.test_bundle import random_bundle, run
from tests.plans.test_load import both_of, bytes_of

NDV2 = rv.Network.preset("ndv2", 2)
ROW, COLUMN = (rv.Layout((64, 64), f"R(1)V(1)D({d})") for d in ("16,1", "1,16"))


def drawn(seed: int) -> tuple[rv.Layout, rv.Layout, rv.Network]:
    """A random pair of layouts over the ranks, or some of them, of a random network."""
    rng = random.Random(seed)
    network = random_network(rng, range(rng.randint(3, 8)))
    ranks = [rng.sample(network.ranks, rng.randint(1, len(network.ranks))) for _ in range(2)]
    src, dst = (random_layout(rng, (12, 10), each) for each in ranks)
    return src, dst, network


@pytest.mark.many(30)
@pytest.mark.parametrize("executor", ["auto", "dist"])
@pytest.mark.parametrize("seed", range(40))
def test_plans_on_random_networks_are_right_and_not_below_the_bound(
    seed: int, executor: str
) -> None:
    src, dst, network = drawn(seed)
    plan = rv.plan(src, dst, "int64", network, executor=executor)
    plan.verify()
    tensor = parts_of(src, "int64")
    result = rv.simulate(plan, shards_of(src, tensor))
    if dst.rvd.v == 1:
        assert np.array_equal(reassembled(dst, result.shards), sum(tensor))
    for field in ("secs", "wire_bytes", "host_bytes", "rounds", "recv_bytes", "peak_bytes"):
        assert getattr(plan.cost, field) >= getattr(plan.bound, field) * (1 - 1e-12), field


@pytest.mark.parametrize("seed", range(10))
def test_a_plan_takes_as_long_as_its_messages_on_their_routes(seed: int) -> None:
    src, dst, network = drawn(seed)
    plan = rv.plan(src, dst, "int64", network, executor="dist", trees=False)
    for step, cost in zip(plan.path.steps, plan.step_costs, strict=True):
        traffic: dict[tuple[int, int], int] = {}
        for part in step.traffic(plan.topology, 8):
            for pair, num_bytes in part.items():
                traffic[pair] = traffic.get(pair, 0) + num_bytes
        assert step_cost(traffic, network).wire_bytes == cost.wire_bytes


def test_a_network_of_levels_is_planned_as_its_topology() -> None:
    topology = rv.Topology.preset("dgx-a100", 2)
    spelled = rv.Network.parse(str(rv.Network.of(topology)))
    assert rv.plan(ROW, COLUMN, topology=spelled) is rv.plan(ROW, COLUMN, topology=topology)


def test_a_far_rank_is_not_used_as_if_it_were_near() -> None:
    """Replicas are read from the nearest holder, which only the wires say."""
    src, dst = (
        rv.Layout((1 << 20,), "R(2)V(1)D(1)", [0, 2]),
        rv.Layout((1 << 20,), "R(1)V(1)D(1)", [1]),
    )
    network = rv.Network.parse("0 <-> 1  1 us  1 GB/s\n1 <-> 2  90 us  1 MB/s")
    plan = rv.plan(src, dst, "uint8", network)
    assert plan.gap < 1.01


def test_a_plan_of_a_network_keeps_it_under_another_limit() -> None:
    plan = rv.plan(ROW, COLUMN, topology=NDV2)
    least = plan.bound.peak_bytes
    leaner = plan_with(plan, executor="dist", memory_limit=4 * least)
    assert leaner.network is NDV2 is plan.network
    assert leaner.cost.peak_bytes <= 4 * least
    assert "ndv2" not in plan.identity
    assert "12.5 GB/s" in plan.identity


TORUS = rv.Network.preset("torus", 4, 4, link=rv.Link(1e-6, 1e9))
WHOLE = rv.Layout((1 << 16, 64), "R(16)V(1)D(1,1)")


def test_trees_are_chosen_where_they_are_faster() -> None:
    src = rv.Layout(WHOLE.shape, "R(1)V(1)D(16,1)")
    plan = rv.plan(src, WHOLE, topology=TORUS)
    assert [step.kind for step in plan.path.steps] == ["trees"]
    assert plan.gap < 1.2
    steps = rv.plan(src, WHOLE, topology=TORUS, trees=False)
    assert steps.forest is None
    assert steps.gap > 4
    assert "trees" in str(plan).splitlines()[3]
    assert plan.cost.wire_bytes == plan.bound.wire_bytes == 15 * src.shape[0] * src.shape[1] * 4


def test_a_limit_on_memory_holds_for_trees() -> None:
    src = rv.Layout(WHOLE.shape, "R(1)V(1)D(16,1)")
    free = rv.plan(src, WHOLE, topology=TORUS)
    least = free.bound.peak_bytes
    limit = least + (free.cost.peak_bytes - least) // 2
    plan = rv.plan(src, WHOLE, topology=TORUS, memory_limit=limit)
    assert plan.cost.peak_bytes <= limit < free.cost.peak_bytes
    assert plan.verify()


def test_slices_of_trees_are_those_of_least_time() -> None:
    src = rv.Layout(WHOLE.shape, "R(1)V(1)D(16,1)")
    plan = rv.plan(src, WHOLE, topology=TORUS)
    small = rv.plan(
        rv.Layout((16, 4), "R(1)V(1)D(16,1)"), rv.Layout((16, 4), "R(16)V(1)D(1,1)"), topology=TORUS
    )
    assert small.forest is None or small.num_slices == 1
    others = [replace(plan, slices=count).cost.secs for count in (1, 2, 4)]
    assert others == sorted(others, reverse=True)
    assert plan.cost.secs <= min(others)


def test_ranks_of_a_host_read_memory_along_trees() -> None:
    src = rv.Layout(WHOLE.shape, "R(1)V(1)D(16,1)")
    plan = rv.plan(src, WHOLE, topology=TORUS)
    peer, dist = (plan_with(plan, executor=executor) for executor in ("peer", "dist"))
    assert peer.forest == dist.forest == plan.forest is not None
    assert peer.domains == (tuple(range(16)),)
    assert peer.program.collectives == ()
    assert dist.program.peer_groups == ()
    assert peer.cost.wire_bytes == dist.cost.wire_bytes


def test_ways_of_another_rank_are_checked() -> None:
    src = rv.Layout(WHOLE.shape, "R(1)V(1)D(16,1)")
    plan = rv.plan(src, WHOLE, topology=TORUS)
    ways = plan.forest.to_json()
    assert planner.with_trees(plan, ways).identity == plan.identity
    assert planner.with_trees(plan, None).forest is None
    for wrong, error in (
        ({**ways, "ways": ways["ways"][:-1]}, "cannot be read"),
        ("nonsense", "cannot be read"),
        ({**ways, "ways": [[[1, 0, []]]] * 16}, "cannot be read"),
        ({**ways, "ways": [[[1, 1, []]]] * 16}, "do not serve this call: rank . gets nothing"),
    ):
        with pytest.raises(rv.LayoutError, match=error):
            planner.with_trees(plan, wrong)


def test_ranks_outside_the_network_are_refused() -> None:
    with pytest.raises(rv.LayoutError, match=r"ranks \[16, 17\] are not in the network"):
        rv.plan(ROW, rv.Layout((64, 64), "R(1)V(1)D(1,2)", [16, 17]), topology=NDV2)


@pytest.mark.parametrize("seed", range(6))
def test_modelled_steps_of_a_bundle_on_a_network_are_counted_steps(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = random_network(random.Random(seed), range(12))
    bundle = random_bundle(seed, executor="dist", topology=network)
    assert bundle.network in (network, None)
    assert not run(bundle)[0]
    modelled, counted = both_of(bundle, monkeypatch)
    assert list(map(bytes_of, modelled)) == list(map(bytes_of, counted))
    for ours, theirs in zip(modelled, counted, strict=True):
        if ours.rounds == theirs.rounds:
            assert ours.secs == pytest.approx(theirs.secs, rel=1e-9)
    assert "x the busiest port" in str(bundle) or bundle.cost.secs == 0


@pytest.mark.parametrize("limit", [4_800_000, 5 << 20, 6 << 20])
def test_a_memory_limit_takes_the_faster_of_trees_and_steps(limit: int) -> None:
    src, dst = (rv.Layout((1 << 20,), x) for x in ("R(1)V(1)D(8)", "R(8)V(1)D(1)"))
    request = src, dst, "float32", rv.Network.preset("dgx-1"), limit
    plan = rv.plan(*request, executor="dist")
    assert plan.peak_bytes <= limit
    assert plan.cost.secs <= rv.plan(*request, executor="dist", trees=False).cost.secs


def test_what_is_no_network_is_named() -> None:
    for make in (
        lambda: rv.plan(ROW, COLUMN, topology="dgx-1"),
        lambda: rv.plan_many({"a": ROW}, {"a": COLUMN}, "float32", topology="dgx-1"),
    ):
        with pytest.raises(rv.LayoutError, match=r"and not 'dgx-1'"):
            make()
