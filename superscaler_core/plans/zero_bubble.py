"""Zero bubble: 1F1B in which gradients of weights fill the idle time (ZB-H1)."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
from superscaler_core.schedules import zero_bubble as order


def zero_bubble(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 8,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """The stages of ``one_f_one_b``, with backwards in halves; the halves for weights wait.

    Communication is that of ``one_f_one_b``, and devices are idle for about a third as long. Every
    group holds the activations of ``pp`` microbatches. ``hybrid`` with
    ``schedule=zero_bubble_h2`` holds those of ``2 pp - 1``, and is not idle in between.

    Args:
        plan: to fill.
        pp, tp, microbatches, zero1, sizes: as in ``one_f_one_b``.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023.
    """
    num = num_workers(plan, pp, tp)
    grid_stages(plan, order(num, microbatches), tp, zero1=zero1, sizes=sizes)
