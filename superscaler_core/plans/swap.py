"""Swap: data parallel whose blocks keep their activations in host memory."""

from __future__ import annotations

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.data_parallel import data_parallel


def swap(plan: Plan, *, keep: Keep = Keep.EVERYTHING) -> None:
    """Move the values that every block keeps for its backward to host memory.

    Communication between devices is that of ``data_parallel``. In addition, the kept values of a
    block are copied to the host in its forward, and back while the next block runs its backward.
    The copies cost no time if they take no longer than the computing in between. Memory per device:
    as in ``data_parallel``, with the activations of two blocks.

    Args:
        plan: to fill.
        keep: which values of the blocks are kept for the backward, on the host.

    Source: Rhu et al., vDNN, 2016.
    """
    data_parallel(plan)
    plan.offload(*plan.blocks.layers)
    plan.keep(keep)
