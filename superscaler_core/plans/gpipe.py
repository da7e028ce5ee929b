"""GPipe: one stage per group of devices, all forwards before all backwards."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
from superscaler_core.schedules import gpipe as order


def gpipe(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 8,
    zero1: bool = False,
    sizes: Sequence[int] = (),
) -> None:
    """Put equally many blocks on every group, and run all forwards before all backwards.

    A microbatch sends the hidden state from stage to stage, and its gradient back. Memory per
    group: 1/``pp`` of the weights; the activations of all microbatches in its stage.

    Args:
        plan: to fill.
        pp, tp, microbatches, zero1, sizes: as in ``one_f_one_b``.

    Source: Huang et al., GPipe, 2019.
    """
    num = num_workers(plan, pp, tp)
    grid_stages(plan, order(num, microbatches), tp, zero1=zero1, sizes=sizes)
