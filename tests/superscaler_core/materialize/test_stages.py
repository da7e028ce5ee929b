"""Plans of one graph share edges, uses of weights and stages that are equal in them."""

from __future__ import annotations

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.materialize import Materialized, materialize
from superscaler_core.materialize.stage_program import StageProgram
from superscaler_core.models import GPT, GPTConfig
from superscaler_core.plans import PLANS


@pytest.fixture(scope="module")
def graph() -> ss.Graph:
    config = GPTConfig.presets()["tiny"]
    tokens = torch.zeros(4, config.sequence, dtype=torch.int64)
    return ss.capture(GPT(config), (tokens, tokens))


def plan_of(graph: ss.Graph, **options: int) -> ss.Plan:
    plan = ss.Plan(graph, range(4))
    PLANS["hybrid"](plan, **{"tp": 2, "pp": 2, "microbatches": 2, **options})
    return plan


def changed(plan: ss.Plan, stage: int) -> ss.Plan:
    """The plan with replicas of one op of a stage that is cut in it."""
    ops = plan.stages[stage].ops
    op = next(op for op in ops if any(part.pieces for part in plan.op_split(op).parts))
    devices = plan.op_split(op).devices
    return plan.with_splits({op: ss.OpSplit.grid(op.sizes, devices, [(None, len(devices))])})


def text(made: Materialized) -> str:
    return str(made.step_program)


def test_equal_plans_are_one(graph: ss.Graph) -> None:
    first = materialize(plan_of(graph))
    assert materialize(plan_of(graph)) is first
    assert materialize(plan_of(graph, microbatches=4)) is not first
    topology = rv.Topology.single_host(4, 5e-6, 200e9)
    assert materialize(plan_of(graph), topology) is not first


@pytest.mark.parametrize("stage", [0, 1])
def test_a_change_of_one_stage_leaves_the_other(graph: ss.Graph, stage: int) -> None:
    first = materialize(plan_of(graph))
    near = materialize(changed(plan_of(graph), stage))
    assert near.stages[1 - stage] is first.stages[1 - stage]
    assert near.stages[stage] is not first.stages[stage]
    assert set(first.edges.all) & set(near.edges.all)
    assert set(first.weights.uses) & set(near.weights.uses)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_shared_stage_is_what_it_would_be_alone(graph: ss.Graph, stage: int) -> None:
    materialize(plan_of(graph))
    near = materialize(changed(plan_of(graph), stage))
    graph.known.clear()
    alone = materialize(changed(plan_of(graph), stage))
    assert all(a is not b for a, b in zip(near.stages, alone.stages, strict=True))
    assert text(near) == text(alone)


def test_a_plan_that_changes_later_changes_nothing(graph: ss.Graph) -> None:
    plan = plan_of(graph)
    made = materialize(plan)
    before = text(made)
    op = plan.stages[0].ops[3]
    plan.split_as(op, ss.OpSplit.grid(op.sizes, [0, 1], [(None, 2)]))
    plan.recompute(plan.stages[1].ops)
    again = materialize(plan_of(graph))
    assert again is made
    assert text(again) == before
    assert again.decided is not None
    assert again.decided.decisions == plan_of(graph).decisions
    assert materialize(plan) is not made


def keys(graph: ss.Graph) -> dict[str, ss.Plan]:
    """Plans that differ in one kind of decision each."""
    found = {name: plan_of(graph) for name in ("plain", "recompute", "rerun", "swap", "gather")}
    found |= {name: plan_of(graph) for name in ("reduce", "host", "overlap", "order", "note")}
    ops = found["plain"].stages[0].ops
    found["recompute"].recompute(ops[3:6])
    found["rerun"].recompute_regions(ops[3:6])
    found["swap"].offload(ops[3:6])
    found["gather"].unshard(ops[3:9])
    found["reduce"].reduce_grads(ops[3:9])
    found["host"].store_on_host("*")
    found["overlap"].overlap = ss.Overlap(prefetch=1)
    found["order"].op_order(ops[3], ops[4])
    found["note"].note("a note")
    return found


def test_every_kind_of_decision_is_in_the_key(graph: ss.Graph) -> None:
    plans = keys(graph)
    assert len({plan.key for plan in plans.values()}) == len(plans)
    assert plans["plain"].key == plan_of(graph).key
    made = {name: materialize(plan) for name, plan in plans.items()}
    assert len({id(each) for each in made.values()}) == len(plans)


def test_stages_differ_where_the_plan_decides_about_them(graph: ss.Graph) -> None:
    made = {name: materialize(plan) for name, plan in keys(graph).items()}
    plain: StageProgram = made["plain"].stages[0]
    for name in ("recompute", "rerun", "swap", "gather", "reduce", "order"):
        assert made[name].stages[0] is not plain, name
        is_alone = made[name].stages[1] is made["plain"].stages[1]
        assert is_alone == (name != "order"), name


def test_a_window_over_two_stages_is_of_both(graph: ss.Graph) -> None:
    """What a window gathers follows from the ops of the other stage too."""

    def plan(axis: int) -> ss.Plan:
        made = plan_of(graph)
        first, second = (
            next(op for op in stage.ops if op.kind == "linear") for stage in made.stages
        )
        made.unshard([first, second])
        loop = [i for i in second.sizes if second.is_splittable(i)][axis]
        split = ss.OpSplit.grid(second.sizes, made.op_split(second).devices, [(loop, 2)])
        return made.with_splits({second: split})

    one, other = (materialize(plan(axis)) for axis in (0, 1))
    assert one.stages[0] is not other.stages[0]
    graph.known.clear()
    assert text(materialize(plan(1))) == text(other)


def test_times_and_memory_are_found_once(graph: ss.Graph) -> None:
    first, second = (ss.compile(plan_of(graph)) for _ in range(2))
    assert first.memory == second.memory
    times = [ss.simulate(program, "a100") for program in (first, second)]
    assert times[0].timeline is times[1].timeline
    assert ss.simulate(first, "v100").secs != times[0].secs
