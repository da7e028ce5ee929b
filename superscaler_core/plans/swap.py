"""Swap: data parallel whose blocks keep their activations in host memory."""

from __future__ import annotations

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.data_parallel import data_parallel


def swap(plan: Plan, *, keep: Keep = Keep.EVERYTHING) -> None:
    """Let what every block keeps for its backward wait in host memory.

    Devices send each other what they send under ``data_parallel``; besides, what a block keeps goes
    to the host in its forward, and comes back while the block after it runs backward. That costs no
    time if it takes no longer than what is computed between. Memory a device: as of
    ``data_parallel``, but the activations are those of two blocks.

    Args:
        plan: to fill.
        keep: what of the blocks stays for the backward, on the host.

    Source: Rhu et al., vDNN, 2016.
    """
    data_parallel(plan)
    plan.swap(*plan.blocks.all)
    plan.keep(keep)
