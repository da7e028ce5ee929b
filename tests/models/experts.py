"""Mixtures of experts of the library transformers, with several implementations of experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from tests.models.families import GROUPED, SMALL, Family


class UnknownExperts(MixtralExperts):
    """Experts of a class that is registered nowhere."""


@dataclass(frozen=True)
class Mixture(Family):
    """A family with experts.

    Attributes:
        implementation: how the experts compute; ``eager`` loops over experts that get tokens.
        dtype: dtype of the model; on the CPU, torch has ``grouped_mm`` only in float32.
        is_known: whether the experts are registered, and so can be split by tokens.
    """

    head: str = "ForCausalLM"
    sizes: Mapping[str, object] = None  # type: ignore[assignment]
    implementation: str = "eager"
    dtype: torch.dtype = torch.float64
    is_known: bool = True

    def model(self) -> nn.Module:
        made = super().model().to(self.dtype)
        made.config._experts_implementation = self.implementation
        for module in made.modules():
            if isinstance(module, MixtralExperts) and not self.is_known:
                module.__class__ = UnknownExperts
        return made

    def batch(self, size: int, seed: int) -> dict[str, Tensor]:
        made = super().batch(size, seed)
        return {k: v.to(self.dtype) if v.is_floating_point() else v for k, v in made.items()}


_MIXTRAL = {**GROUPED, "num_local_experts": 4}
_FLOAT32 = {"dtype": torch.float32, "tolerance": 2e-4}
"""Options of models in float32.

Weights of norms are near 1 and change by about 1e-3. Their rounding error is 6e-8, so their changes
have relative errors of 6e-8 / 1e-3.
"""

MIXTURES: Mapping[str, Mixture] = {
    "Mixtral": Mixture("Mixtral", sizes=_MIXTRAL),
    "Qwen3-MoE": Mixture("Qwen3Moe", sizes={
        **GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8}),
    "DeepSeek-V3": Mixture("DeepseekV3", sizes={
        **SMALL, "num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8,
        "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4, "n_routed_experts": 4,
        "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 8,
        "first_k_dense_replace": 1}),
    "gpt-oss": Mixture("GptOss", sizes={
        **GROUPED, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 4}),
    "Mixtral, opaque": Mixture("Mixtral", sizes=_MIXTRAL, is_known=False),
    "Mixtral, batched": Mixture("Mixtral", sizes=_MIXTRAL, implementation="batched_mm"),
    "Mixtral, batched and traced": Mixture(
        "Mixtral", sizes=_MIXTRAL, implementation="batched_mm", is_known=False),
    "Mixtral, grouped": Mixture(
        "Mixtral", sizes=_MIXTRAL, implementation="grouped_mm", **_FLOAT32),
    "Mixtral, grouped and traced": Mixture(
        "Mixtral", sizes=_MIXTRAL, implementation="grouped_mm", is_known=False, **_FLOAT32),
}  # fmt: skip
"""The mixtures, by their names in papers and the implementation of their experts."""
