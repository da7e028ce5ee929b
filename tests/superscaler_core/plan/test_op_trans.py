from __future__ import annotations

from itertools import pairwise

import pytest

import superscaler_core as ss
from tests.superscaler_core.small import on_one, two_linears

UP = two_linears().ops[0]


@pytest.mark.parametrize("loop", ["b", "n", "k"])
@pytest.mark.parametrize("num", [1, 3])
def test_pieces_of_a_split_tile_the_loop(loop: str, num: int) -> None:
    parts = ss.split(loop, num)(ss.Part(UP))
    ends = [part.range(loop) for part in parts]
    assert ends[0][0] == 0
    assert ends[-1][1] == UP.sizes[loop]
    assert all(a[1] == b[0] for a, b in pairwise(ends))
    assert len({hi - lo for lo, hi in ends}) <= 2


def test_split_of_a_part_cuts_only_the_range_of_the_part() -> None:
    first = ss.split("n", cuts=[0, 3, 8])(ss.Part(UP))[1]
    assert [p.range("n") for p in ss.split("n", 2)(first)] == [(3, 5), (5, 8)]


def test_reduction_split_gives_summands_and_spatial_split_gives_boxes() -> None:
    part = ss.split("k", 2)(ss.split("n", 2)(ss.Part(UP))[1])[0]
    (out,) = part.outputs
    assert str(out) == "up.linear[0:4,4:8] sum over k[0:3]"
    assert [str(view) for view in part.inputs] == [
        "x[0:4,0:3] sum over n[4:8]",
        "up.weight[4:8,0:3]",
    ]


def test_replicas_do_the_same_work() -> None:
    parts = ss.replicate(3)(ss.split("b", 2)(ss.Part(UP))[1])
    assert len(set(parts)) == 3
    assert len({(p.pieces, p.outputs) for p in parts}) == 1
    assert len({new for part in parts for new in ss.replicate(3)(part)}) == 9


@pytest.mark.parametrize(
    "how, match",
    [
        (ss.split("q", 2), r"of up:linear: its annotation .* has no loop 'q'; it has b, k, n"),
        (ss.split("b", 9), "a loop of 4 iterations makes at most as many pieces"),
        (ss.split("b", 0), "at least one"),
        (ss.split("n", cuts=[0, 9]), r"runs from 0 to 8, so the cuts have to ascend from 0 to 8"),
        (ss.split("n", cuts=[0, 5, 2, 8]), "have to ascend"),
        (ss.replicate(0), "takes 1 or more"),
        (ss.pieces({"n": (0, 9)}), r"piece n\[0:9\] of up:linear: the loop runs from 0 to 8"),
    ],
)  # fmt: skip
def test_invalid_splits_raise_plan_error(how: object, match: str) -> None:
    with pytest.raises(ss.PlanError, match=match):
        how(ss.Part(UP))  # type: ignore[operator]


def test_split_of_a_fixed_loop_raises_plan_error_naming_splittable_loops() -> None:
    builder = ss.GraphBuilder("softmax")
    x = builder.input("x", (2, 3), "float64")
    builder.op("softmax", "b v^ -> b v^", [x], [((2, 3), "float64")], "torch.softmax({x0}, -1)")
    part = ss.Part(builder._ops[0])
    with pytest.raises(ss.PlanError, match=r"v cannot be cut in b v\^ -> b v\^; b can"):
        ss.split("v", 3)(part)


def test_only_the_outer_loop_of_a_composed_dim_can_be_split() -> None:
    builder = ss.GraphBuilder("view")
    x = builder.input("x", (6,), "float64")
    builder.op("view", "(h d) -> h d", [x], [((3, 2), "float64")], "{x0}.reshape({out0.shape})")
    part = ss.Part(builder._ops[0])
    assert [str(p.inputs[0].box) for p in ss.split("h", 3)(part)] == ["[0:2]", "[2:4]", "[4:6]"]
    with pytest.raises(ss.PlanError, match="d cannot be cut"):
        ss.split("d", 2)(part)


def test_equal_pieces_become_replicas() -> None:
    plan = ss.Plan(two_linears(), range(3))
    parts = plan.op_trans(plan.graph.ops[0], ss.pieces({"b": (0, 4)}, {"b": (0, 4)}, {}))
    plan.op_assign(parts, plan.devices)
    assert [plan.device(part) for part in parts] == [0, 1, 2]


# --- the plan -----------------------------------------------------------------------------------


def test_op_trans_of_an_op_transforms_all_its_parts() -> None:
    plan = ss.Plan(two_linears(), range(4))
    op = plan.graph.ops[0]
    plan.op_trans(op, ss.split("b", 2))
    assert len(plan.op_trans(op, ss.split("n", 2))) == len(plan.parts(op)) == 4


def test_op_trans_of_one_part_leaves_the_others() -> None:
    plan = ss.Plan(two_linears(), range(4))
    first, second = plan.op_trans(plan.graph.ops[0], ss.split("b", 2))
    new = plan.op_trans(second, ss.split("n", 2))
    assert plan.parts(plan.graph.ops[0]) == (first, *new)
    with pytest.raises(ss.PlanError, match="was already transformed; use its parts"):
        plan.op_trans(second, ss.split("n", 2))


def test_op_assign_to_unknown_or_too_many_devices_raises_plan_error() -> None:
    plan = ss.Plan(two_linears(), range(2))
    op = plan.graph.ops[0]
    with pytest.raises(ss.PlanError, match=r"to device 5: the plan has \[0, 1\]"):
        plan.op_assign(op, 5)
    with pytest.raises(ss.PlanError, match="op_assign of 1 parts of up:linear to 2 devices"):
        plan.op_assign(op, [0, 1])
    with pytest.raises(ss.PlanError, match=r"devices \[0, 0\]: they have to be distinct"):
        ss.Plan(two_linears(), [0, 0])


def test_grid_with_the_wrong_number_of_devices_raises_plan_error() -> None:
    plan = ss.Plan(two_linears(), range(4))
    with pytest.raises(ss.PlanError, match=r"a grid of 2 x 3 needs 6 devices, but 4 were given"):
        plan.spread(plan.graph.ops[0], plan.devices, [ss.Axis(2), ss.Axis(3)])


def test_pipeline_stages_contain_all_ops_in_order() -> None:
    plan = ss.Plan(two_linears(), range(2))
    stages = plan.pipeline([2])
    assert [op for stage in stages for op in stage.ops] == list(plan.graph.ops)
    with pytest.raises(ss.PlanError, match=r"cut points have to ascend from 1 to 3"):
        plan.pipeline([2, 2])


def test_schedule_that_does_not_fit_the_plan_raises_plan_error() -> None:
    plan = on_one(ss.Plan(two_linears(), range(2)))
    with pytest.raises(ss.PlanError, match="schedule gpipe of 3 stages: the plan has 1"):
        plan.op_order(ss.SCHEDULES["gpipe"](3, 2))
    recycled = ss.Schedule.parse("again stages=1 microbatches=1\nworker 0: 0f0 0F0 0B0")
    with pytest.raises(ss.PlanError, match="schedule again: it has forwards without gradient"):
        plan.op_order(recycled)


def test_decisions_about_wrong_groups_or_foreign_ops_raise_plan_error() -> None:
    plan, other = (ss.Plan(two_linears(), range(2)) for _ in range(2))
    (mine, *_), (theirs, *_) = plan.graph.ops, other.graph.ops
    groups = (plan.recompute, plan.recompute_regions, plan.offload, plan.unshard, plan.reduce_grads)
    for decide in groups:
        name = decide.__name__
        with pytest.raises(ss.PlanError, match=f"{name} of 'a': give groups, each a list of ops"):
            decide("a")
        with pytest.raises(ss.PlanError, match=f"{name} of Op.*: give groups"):
            decide(mine)
        with pytest.raises(ss.PlanError, match=f"{name} of 'a': it is no op; give ops of"):
            decide(["a"])
        with pytest.raises(ss.PlanError, match=f"{name} of .* an op of another graph"):
            decide([mine, theirs])
    for ask in (
        lambda: plan.op_trans(theirs, ss.split("b", 2)),
        lambda: plan.op_assign(theirs, 0),
        lambda: plan.op_assign(other.parts(theirs), 0),
        lambda: plan.op_order(mine, theirs),
    ):
        with pytest.raises(ss.PlanError, match=r"op_\w+ of .* an op of another graph"):
            ask()
