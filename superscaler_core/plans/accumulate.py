"""Gradient accumulation: several microbatches per step, one after another."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.data_parallel import data_parallel
from superscaler_core.schedules import one_f_one_b


def accumulate(plan: Plan, *, microbatches: int = 4) -> None:
    """Data parallel that adds up the gradients of microbatches on every device.

    A step all-reduces the gradients once, after the last microbatch. Memory per device: as in
    ``data_parallel`` with the activations of one microbatch.

    Args:
        plan: to fill.
        microbatches: number per step, each as large as the captured batch.
    """
    data_parallel(plan)
    plan.op_order(one_f_one_b(1, microbatches))
