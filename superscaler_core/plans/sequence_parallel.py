"""Sequence parallel: every device has all weights and a share of the tokens of every sequence."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.along import along


def sequence_parallel(plan: Plan) -> None:
    """Cut every op along the sequence, attention along its queries.

    A microbatch gathers keys and values in every layer, and reduces and scatters their gradients;
    a step all-reduces the gradients of weights. Memory per device: all weights, 1/N of the
    activations but for keys and values.
    """
    # Ops that mix the tokens of a sequence, such as a gate's places, are cut along the batch.
    dims = (*plan.blocks.tokens, plan.dims.batch)
    for op in plan.graph.ops:
        plan.op_trans(op, along(plan, op, len(plan.devices), *dims))
        plan.op_assign(op, plan.devices)
