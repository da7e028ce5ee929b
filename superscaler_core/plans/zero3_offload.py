"""ZeRO-3 with offload: devices hold the weights of one block, and hosts hold the rest."""

from __future__ import annotations

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.zero3 import zero3


def zero3_offload(plan: Plan, *, keep: Keep = Keep.EVERYTHING) -> None:
    """Store every device's share of all that ``zero3`` cuts on its host.

    A step moves what ``zero3`` moves; besides, for every microbatch each device takes 1/N of the
    weights from its host twice, and 1/N of the gradients to it once. Memory per device: the weights
    and gradients of one block.

    Args:
        plan: to fill.
        keep: which values of the blocks are kept for the backward.

    Source: Rajbhandari et al., ZeRO-Infinity, 2021.
    """
    zero3(plan)
    plan.store_on_host()
    plan.keep(keep)
