"""1F1B: a stage a device, forward and backward in turn."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.blocks import BLOCK, stages_of_blocks
from superscaler_core.schedules import one_f_one_b as order


def one_f_one_b(plan: Plan, *, microbatches: int = 8, block: str = BLOCK, sizes: str = "") -> None:
    """Put as many blocks on every device, and run a backward as soon as there is one.

    A microbatch sends the hidden state from stage to stage, and its gradient back. Memory a
    device: 1/D of the weights; on stage s activations of at most D - s microbatches.

    Args:
        plan: to fill.
        microbatches: of a step, each as large as what was captured.
        block, sizes: as of ``blocks.stages_of_blocks``.

    Source: Narayanan et al., PipeDream, 2019 (with a flush after every step).
    """
    for stage in stages_of_blocks(plan, len(plan.devices), block=block, sizes=sizes):
        for op in stage.ops:
            plan.op_assign(op, plan.devices[stage.index])
    plan.op_order(order(len(plan.devices), microbatches))
