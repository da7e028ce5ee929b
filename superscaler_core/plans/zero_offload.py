"""ZeRO-Offload: ZeRO 2 whose optimizer runs in host memory."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.blocks import BLOCK, blocks_of
from superscaler_core.plans.zero2 import zero2


def zero_offload(plan: Plan, *, recompute: bool = False, block: str = BLOCK) -> None:
    """Let every device store its share of states, gradients and master weights on its host.

    A step moves what ``zero2`` moves; besides, every device takes 1/N of the gradients to the host
    and 1/N of the weights from it. Memory a device: all weights, the gradients of one block.

    Args:
        plan: to fill.
        recompute: whether to compute the forward of every block again in its backward.
        block: pattern of the blocks' module paths.

    Source: Ren et al., ZeRO-Offload, 2021.
    """
    zero2(plan, block=block)
    plan.store_on_host()
    if recompute:
        plan.recompute(*blocks_of(plan.graph, block))
