"""Chimera: two pipelines in opposite directions; each fills the idle time of the other."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
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
        pp: groups of devices, an even number.
        microbatches: as many as groups if 0; best a multiple of them.
        tp, zero1, sizes: as in ``one_f_one_b``.

    Raises:
        ScheduleError: ``pp`` is odd.

    Source: Li and Hoefler, Chimera, SC 2021.
    """
    num = num_workers(plan, pp, tp)
    grid_stages(plan, order(num, microbatches or num), tp, zero1=zero1, sizes=sizes)
