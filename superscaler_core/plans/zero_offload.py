"""ZeRO-Offload: ZeRO 2 whose optimizer runs in host memory."""

from __future__ import annotations

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.zero2 import zero2


def zero_offload(plan: Plan, *, keep: Keep = Keep.EVERYTHING) -> None:
    """Store every device's share of states, gradients and master weights on its host.

    A step moves what ``zero2`` moves; besides, every device takes 1/N of the gradients to the host
    and 1/N of the weights from it. Memory per device: all weights, the gradients of one block.

    Args:
        plan: to fill.
        keep: which values of the blocks are kept for the backward.

    Source: Ren et al., ZeRO-Offload, 2021.
    """
    zero2(plan)
    plan.store_on_host()
    plan.keep(keep)
