from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.materialize import materialize
from superscaler_core.materialize.sequence import Compute, MoveStep
from tests.superscaler_core.small import branched, on_one, two_linears


def halves(plan: ss.Plan) -> list[tuple[ss.Part, ...]]:
    """All ops cut in two along the batch, both halves on one device."""
    for op in plan.graph.ops:
        plan.op_trans(op, ss.split("b", 2))
    on_one(plan)
    return [plan.parts(op) for op in plan.graph.ops]


def order_of(plan: ss.Plan) -> list[str]:
    return [str(item.part) for item in materialize(plan).items[0] if isinstance(item, Compute)]


def test_parts_run_in_the_order_of_the_graph() -> None:
    plan = ss.Plan(two_linears(), [0])
    assert order_of(on_one(plan)) == [op.name for op in plan.graph.ops]


def test_op_order_makes_chains_run_one_after_another() -> None:
    plan = ss.Plan(two_linears(), [0])
    parts = halves(plan)
    plan.op_order(parts[-1][0], parts[0][1])
    first = [str(pair[0]) for pair in parts]
    assert order_of(plan) == first + [str(pair[1]) for pair in parts]


def test_op_order_of_ops_holds_for_parts_of_later_splits() -> None:
    plan = ss.Plan(branched(), [0])
    mask, select = plan.graph.ops[1:3]
    plan.op_order(mask, select)
    for op in plan.graph.ops:
        plan.op_trans(op, ss.split("b", 2))
    on_one(plan)
    assert plan.orders == tuple((a, b) for a in plan.parts(mask) for b in plan.parts(select))
    assert len(order_of(plan)) == 2 * len(plan.graph.ops)


def test_op_order_of_a_part_that_was_split_raises_plan_error() -> None:
    plan = ss.Plan(two_linears(), [0])
    first, _ = plan.op_trans(plan.graph.ops[0], ss.split("b", 2))
    plan.op_order(first, plan.graph.ops[1])
    plan.op_trans(first, ss.split("n", 2))
    on_one(plan)
    with pytest.raises(ss.PlanError, match=r"op_order of up:linear b\[0:2\]: it was transformed"):
        ss.compile(plan)


def test_cycle_of_order_and_data_raises_order_error_listing_the_ops() -> None:
    plan = on_one(ss.Plan(two_linears(), [0]))
    plan.op_order(plan.graph.ops[2], plan.graph.ops[0])
    cycle = "act:tanh on 0 -> down:linear on 0 -> up:linear on 0 -> act:tanh on 0"
    with pytest.raises(ss.OrderError, match=rf"forms a cycle, .*: {cycle}; take back one op_order"):
        ss.compile(plan)


def test_cycle_through_communication_raises_order_error_with_the_tensor() -> None:
    plan = ss.Plan(two_linears(), [0, 1])
    for op, device in zip(plan.graph.ops, [0, 1, 1, 1], strict=True):
        plan.op_assign(op, device)
    plan.op_order(plan.graph.ops[1], plan.graph.ops[0])
    with pytest.raises(ss.OrderError, match=r"communication of up\.linear -> act:tanh on 1"):
        ss.compile(plan)


def test_op_order_against_the_stages_raises_order_error() -> None:
    plan = on_one(ss.Plan(two_linears(), [0]))
    plan.pipeline([2])
    plan.op_order(plan.graph.ops[3], plan.graph.ops[0])
    with pytest.raises(ss.OrderError, match=r"stage 1 runs after stage 0 in every microbatch"):
        ss.compile(plan)


def test_schedule_with_a_deadlock_raises_order_error() -> None:
    plan = ss.Plan(two_linears(), [0, 1])
    for stage in plan.pipeline([2]):
        for op in stage.ops:
            plan.op_assign(op, stage.index)
    text = "stuck stages=2 microbatches=1\nworker 0: 0F0 0B0\nworker 1: 1B0 1F0"
    plan.op_order(ss.Schedule.parse(text))
    with pytest.raises(ss.OrderError, match=r"schedule stuck on the stages of this plan: .*1B0"):
        ss.compile(plan)


def test_communication_comes_right_before_its_first_reader() -> None:
    plan = ss.Plan(two_linears(), [0, 1])
    for op, device in zip(plan.graph.ops, [0, 0, 1, 1], strict=True):
        plan.op_assign(op, device)
    items = materialize(plan).items[0]
    kinds = [type(item) for item in items]
    assert kinds == [Compute, Compute, MoveStep, Compute, Compute]
    assert str(items[2]) == "communication of act.tanh"


@pytest.mark.parametrize("name", ["naive", "gpipe", "1f1b"])
@pytest.mark.parametrize("num_microbatches", [1, 5])
def test_all_devices_run_events_in_one_global_order(name: str, num_microbatches: int) -> None:
    plan = ss.Plan(two_linears(), [0, 1])
    for stage in plan.pipeline([2]):
        for op in stage.ops:
            plan.op_assign(op, stage.index)
    plan.op_order(ss.SCHEDULES[name](2, num_microbatches))
    made = materialize(plan)
    place = {event: i for i, event in enumerate(made.events)}
    for events in made.events_on.values():
        assert [place[e] for e in events] == sorted(place[e] for e in events)
    assert len(made.events) == num_microbatches * (4 + 2)
