"""Data parallel: every device has all weights and a share of the batch."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.along import along


def data_parallel(plan: Plan) -> None:
    """Cut every op along the batch; ops without a batch are replicated.

    A step all-reduces the gradients, once. Memory per device: all weights, gradients and states;
    1/N of the activations.

    Source: algorithm 1 of the SuperScaler paper.
    """
    for op in plan.graph.ops:
        plan.op_trans(op, along(plan, op, len(plan.devices), plan.dims.batch))
        plan.op_assign(op, plan.devices)
