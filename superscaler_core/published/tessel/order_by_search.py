"""Order by search: the stages of a plan in the best order for the times that they take."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

from superscaler_core.cost import PROFILES, DeviceProfile
from superscaler_core.cost.op_time import OpTimes, halves
from superscaler_core.plan import Placement, Plan, Stage
from superscaler_core.published.tessel.search import search_schedule
from superscaler_core.schedules import ActionKind
from superscaler_core.schedules.schedule import WorkerRoute
from superscaler_core.schedules.timeline import Durations, Time


def order_by_search(
    plan: Plan,
    routes: Sequence[WorkerRoute],
    placement: Placement,
    microbatches: int,
    memory_limit: Time | Sequence[Time] | None = None,
    *,
    split_backward: bool = False,
    profile: DeviceProfile | None = None,
) -> None:
    """Give a plan the schedule that ``search_schedule`` finds for its stages and their graph.

    Args:
        plan: its stages are cut, and their ops have devices.
        routes: the workers of every stage, as in ``search_schedule``.
        placement: the devices of every worker.
        microbatches, memory_limit: as in ``search_schedule``. The search limits its work and not
            its time, so that it finds the same schedule on every rank.
        split_backward: whether backwards are two actions, I and W.
        profile: profile of the devices, for the times of stages; an H100's if None. If it has
            measured times, these are taken.

    Raises:
        PlanError, ScheduleError: as in ``op_order`` and ``search_schedule``.
    """
    times = OpTimes(PROFILES["h100"] if profile is None else profile)
    durations: dict[str | tuple[str, int], Time] = {}
    for stage in plan.stages:
        durations |= _durations(plan, stage, times, split_backward)
    schedule = search_schedule(
        routes, durations, microbatches, memory_limit,
        edges=stage_edges(plan), budget_secs=inf,
    )  # fmt: skip
    plan.op_order(schedule, placement)


def stage_edges(plan: Plan) -> tuple[tuple[int, int], ...]:
    """The stage graph: pairs of a stage that writes an activation and one that reads it."""
    stage_of = {op: stage.index for stage in plan.stages for op in stage.ops}
    writer = {tensor: stage for op, stage in stage_of.items() for tensor in op.outputs}
    pairs = {
        (writer[tensor], stage)
        for op, stage in stage_of.items()
        for tensor in op.inputs
        if tensor in writer and writer[tensor] != stage
    }
    return tuple(sorted(pairs))


def _durations(plan: Plan, stage: Stage, times: OpTimes, split_backward: bool) -> Durations:
    """The times of a stage's actions, on the device that takes longest, in nanoseconds."""
    devices: dict[int | None, dict[ActionKind, float]] = {}
    for op, (inputs, weights) in zip(stage.ops, halves(stage.ops), strict=True):
        for part in plan.parts(op):
            secs = devices.setdefault(plan.device(part), dict.fromkeys(ActionKind, 0.0))
            back_secs = times.backward_secs(part)
            secs[ActionKind.FORWARD] += times.forward_secs(part)
            secs[ActionKind.BACKWARD] += back_secs
            secs[ActionKind.INPUTS] += back_secs * inputs
            secs[ActionKind.WEIGHTS] += back_secs * weights
    backward = (ActionKind.INPUTS, ActionKind.WEIGHTS) if split_backward else (ActionKind.BACKWARD,)
    return {
        (kind, stage.index): max(1, *(round(1e9 * secs[kind]) for secs in devices.values()))
        for kind in (ActionKind.FORWARD, *backward)
    }
