"""Recompute: data parallel that keeps only the input of every block."""

from __future__ import annotations

from superscaler_core.plan import Keep, Plan
from superscaler_core.plans.data_parallel import data_parallel


def recompute(plan: Plan) -> None:
    """Recompute the forward of every block in its backward.

    A step moves what ``data_parallel`` moves. Memory per device: as in ``data_parallel``, but the
    activations are those between blocks and the inner ones of one block.

    Source: Chen et al., Training deep nets with sublinear memory cost, 2016.
    """
    data_parallel(plan)
    plan.keep(Keep.SEGMENT_INPUTS)
