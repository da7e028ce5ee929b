"""OpSplit: a value of the parts of an op and their devices."""

from __future__ import annotations

from typing import Any

import pytest

import superscaler_core as ss
from tests.superscaler_core.small import on_one, two_linears

SIZES = {"b": 4, "k": 6, "n": 8}


def cut(plan: ss.Plan) -> ss.Op:
    op = plan.graph.ops[0]
    plan.op_trans(op, ss.split("b", 2))
    plan.op_trans(op, ss.replicate(2))
    plan.op_assign(op, [3, 1, 0, 2])
    return op


def test_grid_equals_the_split_by_op_trans_and_op_assign() -> None:
    plan = ss.Plan(two_linears(), range(4))
    grid = ss.OpSplit.grid(SIZES, [3, 1, 0, 2], [("b", 2), (None, 2)])
    op = cut(plan)
    assert plan.op_split(op) is grid
    assert grid.parts == plan.decisions.parts[op.name]


def test_op_split_reflects_later_decisions() -> None:
    plan = ss.Plan(two_linears(), range(4))
    op = cut(plan)
    before = plan.op_split(op)
    plan.op_assign(plan.parts(op)[0], 2)
    assert plan.op_split(op).devices == (0, 1, 2)
    plan.op_trans(op, ss.split("n", 2))
    assert len(plan.op_split(op).parts) == 2 * len(before.parts)


def test_split_can_be_moved_to_other_devices_in_order() -> None:
    grid = ss.OpSplit.grid(SIZES, [0, 1], [("n", 2)])
    assert grid.on([5, 7, 9]) is ss.OpSplit.grid(SIZES, [5, 7], [("n", 2)])
    with pytest.raises(ss.PlanError, match="it has 2 devices"):
        grid.on([3])


def test_two_axes_on_one_loop_equal_one_axis_of_their_product() -> None:
    twice = ss.OpSplit.grid(SIZES, [3, 1, 0, 2], [("b", 2), ("b", 2)])
    assert twice is ss.OpSplit.grid(SIZES, [3, 1, 0, 2], [("b", 4)])


@pytest.mark.parametrize(
    ("devices", "axes", "message"),
    [
        (range(3), [("b", 2)], "has 2 devices, but 3 were given"),
        (range(2), [("z", 2)], "loop z cut into 2"),
        (range(5), [("b", 5)], "loop b cut into 5"),
        (range(9), [("b", 3), ("b", 3)], "loop b cut into 9"),
    ],
)
def test_invalid_grid_raises_plan_error(devices: Any, axes: Any, message: str) -> None:
    with pytest.raises(ss.PlanError, match=message):
        ss.OpSplit.grid(SIZES, devices, axes)


def test_unsplit_update_is_stored_on_its_assigned_device_and_survives_a_copy() -> None:
    plan = on_one(ss.Plan(two_linears(), range(2)))
    (name, *_) = plan.graph.parameters
    plan.op_assign(plan.update(name), 1)
    storage = ss.compile(plan).materialized.weights.storage[plan.graph.parameter(name)]
    assert [*storage.shards] == [1]
    assert ss.compile(plan.copy()).files == ss.compile(plan).files
