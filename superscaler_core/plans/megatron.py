"""Megatron tensor parallel: heads and MLP features are cut, the hidden state is whole."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.along import along
from superscaler_core.plans.pieces.vocabulary import vocabulary_dims


def megatron(plan: Plan, *, vocabulary: bool = False) -> None:
    """Cut every block between its linear maps, the first by rows and the second by columns.

    Ops without inner features, such as a norm, are replicated. A microbatch all-reduces the hidden
    state twice per layer forward and twice backward. Memory per device: 1/N of the weights of the
    blocks, all other weights.

    Args:
        plan: to fill.
        vocabulary: cut the embedding and the head along the words too. The scores then go from
            words to tokens by an all-to-all, as the loss is cut along the sequence.

    Source: Shoeybi et al., Megatron-LM, 2019.
    """
    for op in plan.graph.ops:
        dims = vocabulary_dims(plan, op) if vocabulary else ()
        plan.op_trans(op, along(plan, op, len(plan.devices), *dims, *plan.blocks.inner))
        plan.op_assign(op, plan.devices)
