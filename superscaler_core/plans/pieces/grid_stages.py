"""Stages on grids: every stage on a group of devices, a grid of batch times inner features."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superscaler_core.errors import PlanError
from superscaler_core.plan import Placement, Plan
from superscaler_core.plans.pieces.along import shares
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.plans.pieces.tensor_parallel import tensor_parallel
from superscaler_core.schedules import Schedule


def num_workers(plan: Plan, pp: int, tp: int) -> int:
    """The number of a pipeline's workers: ``pp``; if 0, the number of groups of ``tp`` devices."""
    return pp or len(plan.devices) // tp


def grid_stages(
    plan: Plan,
    schedule: Schedule,
    tp: int = 1,
    *,
    sequence: bool = False,
    vocabulary: bool = False,
    experts: bool | int = False,
    sizes: Sequence[int] = (),
) -> None:
    """Cut a plan into a schedule's stages, each on the devices of its workers, and order them.

    Args:
        plan: to fill.
        schedule: the schedule; its workers are groups of consecutive devices, all of the same
            size.
        tp: devices that share a stage's inner features; the batch is cut among the rest of a group.
        sequence, vocabulary, experts: as in ``tensor_parallel``.
        sizes: as in ``stages_of_blocks``.

    Raises:
        PlanError: ``tp`` times the workers does not divide the devices, or a stage of the schedule
            runs on several workers at once.
    """
    _check_stages(schedule)
    shares(plan, tp=tp, pp=schedule.num_workers)
    placement = Placement.even(plan.devices, schedule.num_workers)
    splits: dict[str, Any] = {"sequence": sequence, "vocabulary": vocabulary, "experts": experts}
    for stage in stages_of_blocks(plan, schedule.num_stages, sizes):
        devices = sorted(placement.devices_of(schedule, stage.index, 0))
        tensor_parallel(plan, stage.ops, devices, tp, **splits)
    plan.op_order(schedule, placement)


def _check_stages(schedule: Schedule) -> None:
    """Refuse a schedule with stages that are cut among several workers."""
    for stage in range(schedule.num_stages):
        workers = schedule.workers_of(stage, 0)
        if len(workers) > 1:
            raise PlanError(
                f"schedule {schedule.name} runs stage {stage} on workers "
                f"{', '.join(map(str, workers))} at once: it is for a stage that is cut among all "
                "of them, such as the look-up of a large embedding, with stages of blocks on one "
                "worker each behind it. Here all stages are blocks on one worker; use the plan "
                "'interlaced', which makes such stages, or another schedule."
            )
