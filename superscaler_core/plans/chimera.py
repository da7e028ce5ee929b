"""Chimera: two pipelines in opposite directions; each fills the idle time of the other."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages
from superscaler_core.plans.pieces.storage import shard_storage
from superscaler_core.schedules import chimera as order


def chimera(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 0,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Send half of the microbatches down ``pp`` groups of devices, and half of them up.

    A microbatch sends the hidden state from stage to stage, and its gradient back; once per step
    the gradients of every stage are summed over its two groups. Memory per group: 2/pp of the
    weights; activations of pp/2 + 1 (first and last group) to pp (middle) microbatches of a stage.

    Args:
        plan: to fill.
        pp: groups of devices, an even number; one a device if 0.
        tp: devices of a group that share a stage's inner features; the batch is cut among the rest.
        microbatches: of a step, a multiple of ``pp``; that if 0.
        zero1: cut master weights and states among all devices that read them, of both groups.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Raises:
        PlanError: ``tp * pp`` does not divide the devices.
        ScheduleError: ``pp`` is odd, or does not divide the microbatches.

    Source: Li and Hoefler, Chimera, SC 2021.
    """
    num = pp or len(plan.devices)
    grid_stages(plan, tp, num, microbatches or num, sizes=sizes)
    plan.op_order(order(num, microbatches or num), plan.placement)
    if zero1:
        shard_storage(plan)
