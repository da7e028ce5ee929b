"""GPipe: a stage a device, all forwards before all backwards."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.blocks import BLOCK, stages_of_blocks
from superscaler_core.schedules import gpipe as order


def gpipe(plan: Plan, *, microbatches: int = 8, block: str = BLOCK, sizes: str = "") -> None:
    """Put as many blocks on every device, and run all forwards before all backwards.

    A microbatch sends the hidden state from stage to stage, and its gradient back. Memory a
    device: 1/D of the weights; of its stage the activations of all microbatches.

    Args:
        plan: to fill.
        microbatches: of a step, each as large as what was captured.
        block, sizes: as of ``blocks.stages_of_blocks``.

    Source: Huang et al., GPipe, 2019.
    """
    for stage in stages_of_blocks(plan, len(plan.devices), block=block, sizes=sizes):
        for op in stage.ops:
            plan.op_assign(op, plan.devices[stage.index])
    plan.op_order(order(len(plan.devices), microbatches))
