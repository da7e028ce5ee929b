"""Recompute: data parallel that keeps of every block only its input."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.blocks import BLOCK, blocks_of
from superscaler_core.plans.data_parallel import data_parallel


def recompute(plan: Plan, *, block: str = BLOCK) -> None:
    """Compute the forward of every block again in its backward.

    A step moves what ``data_parallel`` moves. Memory a device: as of ``data_parallel``, but the
    activations are those between blocks and the inner ones of one block.

    Args:
        plan: to fill.
        block: pattern of the blocks' module paths.

    Source: Chen et al., Training deep nets with sublinear memory cost, 2016.
    """
    data_parallel(plan)
    plan.recompute(*blocks_of(plan.graph, block))
