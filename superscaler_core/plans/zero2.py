"""ZeRO 2: data parallel with states and gradients cut among the devices."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.zero1 import zero1


def zero2(plan: Plan) -> None:
    """ZeRO 1 that reduces the gradients of a block as soon as its backward is done.

    A step moves what ``zero1`` moves; with accumulation more, as every microbatch reduces and
    scatters all gradients. Memory per device: all weights, the gradients of one block, 1/N of all
    gradients, master weights and states.

    Source: Rajbhandari et al., ZeRO, 2019.
    """
    zero1(plan)
    plan.reduce_grads(*plan.blocks.groups)
