"""Tensor and sequence parallel: features inside the blocks' maps, tokens between them."""

from __future__ import annotations

from superscaler_core.plan import Plan
from superscaler_core.plans.pieces.tensor_parallel import tensor_parallel


def megatron_sp(plan: Plan, *, vocabulary: bool = False) -> None:
    """Cut the inner features as ``megatron`` does, and all other ops along the sequence.

    A microbatch all-gathers and reduce-scatters the hidden state, twice per layer forward and
    twice backward: the volume of ``megatron``. Memory per device: as in ``megatron``, with 1/N of
    all activations.

    Args:
        plan: to fill.
        vocabulary: as in ``megatron``.

    Source: Korthikanti et al., Reducing activation recomputation in large transformer models, 2022.
    """
    ops, devices = plan.graph.ops, plan.devices
    tensor_parallel(plan, ops, devices, len(devices), sequence=True, vocabulary=vocabulary)
