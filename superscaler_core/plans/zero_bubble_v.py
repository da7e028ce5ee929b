"""ZB-V: a zero bubble with the memory of 1F1B; every group has two stages of a V."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
from superscaler_core.schedules import zero_bubble_v as order


def zero_bubble_v(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 0,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Stages go down the groups and come back, so that the last one is where the first one is.

    A microbatch sends the hidden state twice as often as under ``one_f_one_b``. If F, I and W take
    equally long, no group waits between its first and its last action. Memory per group:
    1/``pp`` of the weights; activations of ``2 pp`` microbatches of a stage; there are ``2 pp``
    stages.

    Args:
        plan: to fill.
        microbatches: best ``2 * pp`` or more; 0 means ``2 * pp``.
        pp, tp, zero1, sizes: as in ``one_f_one_b``.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
    """
    num = num_workers(plan, pp, tp)
    grid_stages(plan, order(num, microbatches or 2 * num), tp, zero1=zero1, sizes=sizes)
