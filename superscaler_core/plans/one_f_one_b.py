"""1F1B: one stage per device, alternating forward and backward."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
from superscaler_core.schedules import one_f_one_b as order


def one_f_one_b(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 8,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Put equally many blocks on every group, and run a backward as soon as one is ready.

    A microbatch sends the hidden state from stage to stage, and its gradient back. Memory per
    group: 1/``pp`` of the weights; the activations of at most ``pp - s`` microbatches on stage s.

    Args:
        plan: to fill.
        pp: groups of devices; if 0, as many as there are groups of ``tp`` devices.
        tp: devices of a group that share a stage's inner features; the batch is cut among the rest.
        microbatches: number per step, each as large as the captured batch.
        zero1: cut master weights and states among all devices that read them.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Raises:
        PlanError: ``tp * pp`` does not divide the devices.

    Source: Narayanan et al., PipeDream, 2019 (with a flush after every step).
    """
    num = num_workers(plan, pp, tp)
    grid_stages(plan, order(num, microbatches), tp, zero1=zero1, sizes=sizes)
