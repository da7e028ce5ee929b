"""GPipe: one stage per device, all forwards before all backwards."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.plan import Placement, Plan
from superscaler_core.plans.pieces.stages import stages_of_blocks
from superscaler_core.schedules import gpipe as order


def gpipe(plan: Plan, *, microbatches: int = 8, sizes: Sequence[int] = ()) -> None:
    """Put equally many blocks on every device, and run all forwards before all backwards.

    A microbatch sends the hidden state from stage to stage, and its gradient back. Memory per
    device: 1/D of the weights; of its stage the activations of all microbatches.

    Args:
        plan: to fill.
        microbatches: of a step, each as large as what was captured.
        sizes: blocks of every stage, as in ``stages_of_blocks``.

    Source: Huang et al., GPipe, 2019.
    """
    for stage in stages_of_blocks(plan, len(plan.devices), sizes):
        for op in stage.ops:
            plan.op_assign(op, plan.devices[stage.index])
    num = len(plan.devices)
    plan.op_order(order(num, microbatches), Placement.even(plan.devices, num))
