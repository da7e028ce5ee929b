"""Small models of the families that are tried, with values that a seed determines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

FAMILIES = ("llama", "qwen3", "qwen3_moe", "gemma3")
_SIZES = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 250,
    "max_position_embeddings": 128,
}
_MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}


def made(family: str, seed: int) -> Any:
    """A model of a family: fused and grouped heads, tied heads, experts, padded vocabularies."""
    torch.manual_seed(seed)
    match family:
        case "llama":
            model: Any = hf.LlamaForCausalLM(hf.LlamaConfig(**_SIZES))
        case "qwen3":
            config = hf.Qwen3Config(**_SIZES, head_dim=32, tie_word_embeddings=True)
            model = hf.Qwen3ForCausalLM(config)
        case "qwen3_moe":
            model = hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**_SIZES, **_MIXTURE, head_dim=32))
        case _:
            kinds = ["sliding_attention", "full_attention"]
            config = hf.Gemma3TextConfig(
                **_SIZES, head_dim=32, sliding_window=32, layer_types=kinds
            )
            model = hf.Gemma3ForCausalLM(config)
    # Other values than those that vLLM gives what it does not load: ones, zeros. Layers are made so
    # strong that a model with a tied head does more than repeat the last word.
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            strength = 0.3 if ".layers." in name else 0.02
            parameter.add_(strength * torch.randn_like(parameter))
    return model


def folder(family: str, seed: int, root: Path) -> Path:
    """The checkpoint of a model, as transformers writes it."""
    found = root / f"{family}-{seed}"
    if not found.exists():
        made(family, seed).save_pretrained(found)
    return found
