"""Laws of candidates: every pair has one, the direct exchange bounds them, planes are used."""

from __future__ import annotations

import random

import pytest

import rvdcomm as rv
from rvdcomm import Plan
from rvdcomm.planning.candidates import candidate_paths, direct_path
from tests.oracle import plan_faults, random_pair, random_topology

SHAPE = (16, 24)
NUM_BYTES = 16 * 24 * 4
ONE_HOST = rv.Topology.single_host(8, 0, 1.0)
TWO_HOSTS = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(0, 64.0), rv.Link(0, 1.0))


def apart(src: str, dst: str, topology: rv.Topology = TWO_HOSTS) -> rv.Plan:
    """The plan from ranks 0 to 3 to ranks 4 to 7."""
    ends = rv.Layout(SHAPE, src), rv.Layout(SHAPE, dst, ranks=[4, 5, 6, 7])
    return rv.plan(*ends, topology=topology)


def kinds(plan: rv.Plan) -> list[str]:
    return [step.kind for step in plan.path.steps]


# --- laws ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_no_plan_takes_longer_than_the_direct_exchange(seed: int) -> None:
    rng = random.Random(seed)
    slower = []
    for _ in range(100):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        plan = rv.plan(src, dst, "int64", topology, executor="dist")
        direct = Plan(direct_path(src, dst), "int64", topology)
        # Candidates tie within a billionth.
        if plan.cost.secs > direct.cost.secs * (1 + 1e-8):
            slower.append(f"{src} -> {dst}: {plan.cost.secs}, direct {direct.cost.secs}")
    assert slower == []


@pytest.mark.parametrize("seed", range(4))
def test_every_candidate_leads_from_src_to_dst(seed: int) -> None:
    rng = random.Random(seed)
    broken = []
    for _ in range(50):
        (src, dst), topology = random_pair(rng), random_topology(rng)
        for path in candidate_paths(src, dst, 8, topology):
            states = [src.placement, *(step.dst.placement for step in path.steps)]
            starts = [step.src.placement for step in path.steps]
            held = [{r: p.num_elements(r) for r in p.ranks} for p in (*starts, dst.placement)]
            left = [{r: p.num_elements(r) for r in p.ranks} for p in states]
            if path.steps and held != left:
                broken.append(f"{src} -> {dst}: {path}")
    assert broken == []


def test_same_layout_has_one_candidate_without_steps() -> None:
    layout = rv.Layout(SHAPE, "R(2)V(1)D(2,1)")
    assert [path.steps for path in candidate_paths(layout, layout, 4, ONE_HOST)] == [()]


def test_irregular_pair_has_the_direct_exchange_too() -> None:
    src = rv.Layout(SHAPE, "R(1)V(2)D(2,1)")
    dst = rv.Layout(SHAPE, "R(2)V(1)D(1,2)", ranks=[2, 3, 4, 5])
    assert direct_path(src, dst) in list(candidate_paths(src, dst, 4, ONE_HOST))


# --- two planes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, dst, steps",
    [
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", ["transfer"]),
        ("R(4)V(1)D(1,1)", "R(1)V(1)D(4,1)", ["transfer"]),
        ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", ["transfer", "all_gather"]),
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", ["reduce_scatter", "transfer"]),
        ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", ["reduce_scatter", "transfer", "all_gather"]),
    ],
)
def test_parts_are_summed_before_and_replicas_made_after_the_transfer(
    src: str, dst: str, steps: list[str]
) -> None:
    assert kinds(apart(src, dst)) == steps


@pytest.mark.parametrize(
    "src, dst",
    [
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
        ("R(4)V(1)D(1,1)", "R(4)V(1)D(1,1)"),
        ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"),
        ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(2,2)"),
        ("R(2)V(2)D(1,1)", "R(2)V(1)D(1,2)"),
    ],
)
def test_transfer_sends_one_copy_between_hosts(src: str, dst: str) -> None:
    # Source: docs/bound.md: extra replicas and parts stay inside a host.
    assert apart(src, dst).cost.host_bytes == NUM_BYTES


def test_high_latency_makes_all_replicas_by_one_transfer() -> None:
    topology = rv.Topology.single_host(8, 1.0, 1e12)
    assert kinds(apart("R(4)V(1)D(1,1)", "R(4)V(1)D(1,1)", topology)) == ["transfer"]


# --- other cuts in another group ----------------------------------------------------------------


@pytest.mark.parametrize("sizes", [(32, 32), (16, 32), (32, 16)])
def test_all_to_all_runs_in_the_smaller_group_if_messages_are_short(sizes: tuple[int, int]) -> None:
    num_src, num_dst = sizes
    cluster = rv.Topology.preset("h100", sum(sizes) // 8, 8)
    src = rv.Layout((128, 128), f"R(1)V(1)D({num_src},1)", range(num_src))
    dst = rv.Layout((128, 128), f"R(1)V(1)D(1,{num_dst})", range(num_src, sum(sizes)))
    plan = rv.plan(src, dst, "float32", cluster)
    kinds = [step.kind for step in plan.path.steps]
    assert kinds.count("transfer") == 1
    assert kinds[0 if num_src <= num_dst else -1] == "all_to_all"
    assert plan.cost.rounds < min(sizes)
    assert plan_faults(plan) == []
