"""ZeRO 3: data parallel with states, gradients and weights cut among the devices."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.zero1 import zero1


def zero3(plan: Plan) -> None:
    """ZeRO 2 that also gathers the weights of a block for its forward, and again for its backward.

    A microbatch gathers all weights twice, and reduces and scatters all gradients: 1.5 times the
    volume of an all-reduce. Memory per device: 1/N of everything, and the weights and gradients of
    one block.

    Source: Rajbhandari et al., ZeRO, 2019.
    """
    zero1(plan)
    plan.unshard(*plan.blocks.groups)
