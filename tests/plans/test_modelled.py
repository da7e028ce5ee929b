"""Laws of modelled costs and bounds: where a formula exists, it equals the counted value."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import product

import pytest

import rvdcomm as rv
from rvdcomm.cost import lower_bound
from rvdcomm.planning.modelled_bound import modelled_bound
from rvdcomm.plans.modelled import ModelledCost, modelled_cost
from tests.oracle import all_rvds
from tests.planning.test_transfer import WORLDS as GROUPS
from tests.planning.test_transfer import levels

NUM_PAIRS = 60
IN_GROUP = {
    "8": (8, levels(8)),
    "2 hosts of 4": (8, levels(8, 4)),
    "2 hosts of 6": (12, levels(12, 6)),
    "2 racks of 4 hosts of 2": (16, levels(16, 2, 8)),
}
WORLDS = {name: (n, n, 0, topology) for name, (n, topology) in IN_GROUP.items()}
WORLDS |= {
    f"from {name}": (n, m, n, topology)
    for name, (n, m, topology) in GROUPS.items()
    if name not in ("4 to 4", "4 to 8", "one host", "hosts of 4")
}
worlds = pytest.mark.parametrize("world", WORLDS.values(), ids=WORLDS)

World = tuple[int, int, int, rv.Topology]


def plans_of(world: World, shape: tuple[int, int] = (96, 144)) -> list[rv.Plan]:
    num_src, num_dst, first, topology = world
    pairs = list(product(all_rvds(num_src, 2), all_rvds(num_dst, 2)))
    ranks = range(first, first + num_dst)
    return [
        rv.plan(
            rv.Layout(shape, src),
            rv.Layout(shape, dst, ranks),
            "float32",
            topology,
            executor="dist",
        )
        for src, dst in random.Random(0).sample(pairs, min(len(pairs), NUM_PAIRS))
    ]


def both_of(world: World) -> list[tuple[rv.Plan, ModelledCost]]:
    """The plans that have a formula, and its costs."""
    found = [(plan, plan.modelled) for plan in plans_of(world)]
    known = [(plan, modelled) for plan, modelled in found if modelled is not None]
    assert len(known) >= NUM_PAIRS // 4
    return known


def bytes_of(cost: rv.Cost) -> tuple[int, int, int]:
    return cost.wire_bytes, cost.host_bytes, cost.recv_bytes


@worlds
def test_modelled_bytes_of_every_step_equal_counted_bytes(world: World) -> None:
    for plan, modelled in both_of(world):
        assert bytes_of(modelled.cost) == bytes_of(plan.cost)
        counted = [step.recv_bytes for step in plan.step_costs]
        assert [step.recv_bytes for step in modelled.steps] == counted


@worlds
def test_modelled_time_equals_counted_time_if_the_rounds_are_equal(world: World) -> None:
    both = [(plan.cost, m) for plan, m in both_of(world)]
    assert all(modelled.cost.rounds <= counted.rounds for counted, modelled in both)
    assert all(m.cost.rounds == counted.rounds for counted, m in both if m.is_exact)
    same = [(counted, m.cost) for counted, m in both if counted.rounds == m.cost.rounds]
    assert len(same) >= 0.8 * len(both)
    # Floats that are added in another order.
    assert [m.secs for _, m in same] == pytest.approx([c.secs for c, _ in same], rel=1e-12)


@worlds
def test_modelled_latency_is_the_time_at_very_high_bandwidth(world: World) -> None:
    links = [replace(level.link, bytes_per_sec=1e30) for level in world[-1].levels]
    pairs = zip(world[-1].levels, links, strict=True)
    fast = rv.Topology(tuple(replace(level, link=link) for level, link in pairs))
    both = [(modelled_cost(plan.path, 4, fast), m) for plan, m in both_of(world)]
    secs = [found.cost.secs for found, _ in both if found is not None]
    assert [m.latency_secs for _, m in both] == pytest.approx(secs, rel=1e-12)


@worlds
def test_modelled_memory_is_0_85_to_3_1_times_the_counted_peak(world: World) -> None:
    ratios = [m.cost.peak_bytes / plan.cost.peak_bytes for plan, m in both_of(world)]
    # Below 1, where the arena has holes; above 1, where the lowering leaves out copies.
    assert min(ratios) > 0.85
    assert max(ratios) < 3.1


@worlds
def test_modelled_bound_equals_the_lower_bound(world: World) -> None:
    found = [
        (modelled_bound(plan.src, plan.dst, 4, plan.topology), plan) for plan in plans_of(world)
    ]
    known = [(bound, plan) for bound, plan in found if bound is not None]
    assert len(known) >= NUM_PAIRS // 4
    wrong = [
        f"{p.src} -> {p.dst}"
        for bound, p in known
        if bound != lower_bound(p.src, p.dst, 4, p.topology)
    ]
    assert wrong == []


@pytest.mark.parametrize("shape", [(13, 30), (30, 7)])
def test_for_uneven_shards_models_overestimate_costs_and_underestimate_bounds(
    shape: tuple[int, int],
) -> None:
    num_modelled = 0
    for plan in plans_of(WORLDS["2 hosts of 4"], shape):
        bound = modelled_bound(plan.src, plan.dst, 4, plan.topology)
        if plan.modelled is not None and bound is not None:
            num_modelled += 1
            assert plan.modelled.cost.wire_bytes >= plan.cost.wire_bytes
            assert bound.wire_bytes <= plan.bound.wire_bytes
            assert bound.secs <= plan.bound.secs
    assert num_modelled > 0


def test_overlapping_rank_groups_have_no_modelled_cost_or_bound() -> None:
    src, dst = rv.Layout((6, 6), "R(1)V(1)D(6,1)"), rv.Layout((6, 6), "R(1)V(1)D(1,6)", range(2, 8))
    plan = rv.plan(src, dst)
    assert modelled_cost(plan.path, 4, plan.topology) is None
    assert modelled_bound(src, dst, 4, plan.topology) is None


def test_plans_of_few_ranks_are_counted_and_of_many_are_modelled() -> None:
    def plan(n: int) -> rv.Plan:
        return rv.plan(
            rv.Layout((256, 256), f"R(1)V(1)D({n},1)"), rv.Layout((256, 256), f"R({n})V(1)D(1,1)")
        )

    assert plan(64).is_counted
    assert not plan(128).is_counted
    assert "peak memory" in str(plan(64))
    assert "modelled memory" in str(plan(128))
    assert "program" not in vars(plan(128))
