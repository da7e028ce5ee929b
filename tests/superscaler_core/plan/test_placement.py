"""A schedule's workers are devices of the plan."""

from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.schedules import interleaved
from tests.superscaler_core.training import Case


def plan_of(device_of: tuple[int, ...]) -> ss.Plan:
    """Four stages of an interleaved schedule of two workers, each stage on a device."""
    graph = Case("one_f_one_b", 2, sizes={"layers": 4}).compiled().plan.graph
    plan = ss.Plan(graph, range(2))
    size = len(graph.ops) // 4
    for stage in plan.pipeline([size, 2 * size, 3 * size]):
        for op in stage.ops:
            plan.op_assign(op, device_of[stage.index])
    plan.op_order(interleaved(2, 4, 2))
    return plan


def test_stages_of_a_worker_are_on_one_device() -> None:
    assert ss.compile(plan_of((0, 1, 0, 1))).files


def test_a_worker_on_two_devices_is_refused() -> None:
    words = r"stages 0 and 2 on worker 0, .* stage 0 on devices \[0\] and stage 2 on \[1\]"
    with pytest.raises(PlanError, match=words):
        ss.compile(plan_of((0, 0, 1, 1)))
