"""Megatron tensor parallel: heads and MLP features are cut, the hidden state is whole."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.tensor_parallel import tensor_parallel


def megatron(plan: Plan, *, vocabulary: bool = False, features: str = "") -> None:
    """Cut every block between its linear maps, the first by rows and the second by columns.

    A microbatch all-reduces the hidden state twice a layer forward and twice backward. Memory a
    device: 1/N of the weights of the blocks, all of the others.

    Args:
        plan: to fill.
        vocabulary: cut the embedding and the head along the words too. The scores then go from
            words to tokens by an all-to-all, as the loss is cut along the sequence.
        features: what is cut, as ``cuts.inner`` takes it.

    Source: Shoeybi et al., Megatron-LM, 2019.
    """
    tensor_parallel(
        plan,
        plan.graph.ops,
        plan.devices,
        len(plan.devices),
        vocabulary=vocabulary,
        features=features,
    )
