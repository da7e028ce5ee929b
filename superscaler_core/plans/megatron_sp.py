"""Tensor and sequence parallel: features inside the blocks' maps, tokens between them."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.tensor_parallel import tensor_parallel


def megatron_sp(plan: Plan, *, vocabulary: bool = False, features: str = "") -> None:
    """Cut the inner features as ``megatron`` does, and all other ops along the sequence.

    A microbatch gathers the hidden state and reduces and scatters it, twice a layer forward and
    twice backward: the volume of ``megatron``. Memory a device: as of ``megatron``, and 1/N of all
    activations.

    Args:
        plan: to fill.
        vocabulary, features: as of ``megatron``.

    Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2022.
    """
    tensor_parallel(
        plan,
        plan.graph.ops,
        plan.devices,
        len(plan.devices),
        sequence=True,
        vocabulary=vocabulary,
        features=features,
    )
