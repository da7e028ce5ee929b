"""The tested families of the library transformers: a tiny model of each, and its data.

Models have random weights in float64. They have four blocks, so that a pipeline on four devices has
one block per stage. Some labels are -100 and some sequences are padded, so that the loss averages
over different numbers of labels in different parts of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.libraries import transformers

WORDS = 32
IGNORED = -100

Data = Callable[[int, torch.Generator], dict[str, Tensor]]
"""A function that makes the tensors of a batch.

Each call gets its own generator, because ranks that run as threads draw at the same time.
"""


# --- data -------------------------------------------------------------------------------------


def words(batch: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Padded sentences; the labels are the words themselves."""
    ids = torch.randint(3, WORDS, (batch, 8), generator=draw)
    mask = torch.ones_like(ids)
    mask[1::3, 6:] = 0
    mask[2::3, 5:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def hidden_words(batch: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Sentences in which every second word must be predicted."""
    data = words(batch, draw)
    data["labels"][:, ::2] = IGNORED
    return data


def translation(batch: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Sentences with shorter sentences as labels."""
    labels = torch.randint(3, WORDS, (batch, 6), generator=draw)
    labels[2::3, 4:] = IGNORED
    return {**words(batch, draw), "labels": labels}


def speech(batch: int, draw: torch.Generator) -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(batch, 8, 16, generator=draw),
        "labels": translation(batch, draw)["labels"],
    }


def images(batch: int, draw: torch.Generator) -> dict[str, Tensor]:
    return {
        "pixel_values": torch.randn(batch, 3, 32, 32, generator=draw),
        "labels": torch.randint(3, (batch,), generator=draw),
    }


def captions(batch: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Images with sentences, each of which ends with the end-of-sentence token."""
    data = words(batch, draw)
    data["input_ids"][:, -1] = 2
    return {
        "input_ids": data["input_ids"],
        "attention_mask": data["attention_mask"],
        "pixel_values": images(batch, draw)["pixel_values"],
    }


# --- families ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Family:
    """A family of models.

    Attributes:
        name: name of the family in transformers, such as ``Llama``.
        head: rest of the name of the model class.
        sizes: sizes of the model.
        data: makes a batch.
        tolerance: relative tolerance of results; 1e-5 for models that cast to float32.
        options: arguments of the forward that are not tensors.
    """

    name: str
    head: str
    sizes: Mapping[str, Any]
    data: Data = words
    tolerance: float = 1e-5
    options: Mapping[str, Any] = field(default_factory=dict)

    def model(self) -> nn.Module:
        """A model with the same random weights every time."""
        config = getattr(transformers, self.config)(**self.sizes)
        torch.manual_seed(0)
        made: nn.Module = getattr(transformers, self.name + self.head)(config)
        return made.double().train()

    @cached_property
    def config(self) -> str:
        """The name of the configuration class."""
        return f"{self.name}TextConfig" if self.name == "Gemma3" else f"{self.name}Config"

    def batch(self, size: int, seed: int) -> dict[str, Tensor]:
        """The tensors of a batch."""
        made = self.data(size, torch.Generator().manual_seed(seed))
        return {k: v.double() if v.is_floating_point() else v for k, v in made.items()}


_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4,
    "num_attention_heads": 4, "max_position_embeddings": 64, **_SPECIAL,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 4}
_GPT = {
    "vocab_size": WORDS, "n_embd": 16, "n_layer": 4, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **_SPECIAL,
}  # fmt: skip
_SEQ2SEQ = {
    "vocab_size": WORDS, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 64, "dropout": 0.0, **_SPECIAL,
    "decoder_start_token_id": 2,
}  # fmt: skip
_IMAGES = {
    "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8,
}  # fmt: skip

FAMILIES: Mapping[str, Family] = {
    "GPT-2": Family("GPT2", "LMHeadModel", _GPT),
    "GPT-NeoX": Family("GPTNeoX", "ForCausalLM", SMALL),
    "GPT-J": Family("GPTJ", "ForCausalLM", {**_GPT, "rotary_dim": 2}),
    "OPT": Family("OPT", "ForCausalLM",
                  {**SMALL, "ffn_dim": 32, "word_embed_proj_dim": 16, "dropout": 0.0}),
    "Bloom": Family("Bloom", "ForCausalLM", {
        "vocab_size": WORDS, "hidden_size": 16, "n_layer": 4, "n_head": 4, **_SPECIAL}),
    "Falcon": Family("Falcon", "ForCausalLM", {**SMALL, "multi_query": True}),
    "Llama": Family("Llama", "ForCausalLM", GROUPED),
    "Mistral": Family("Mistral", "ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Qwen2": Family("Qwen2", "ForCausalLM", GROUPED),
    "Qwen3": Family("Qwen3", "ForCausalLM", GROUPED),
    "Gemma 2": Family("Gemma2", "ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Gemma 3": Family("Gemma3", "ForCausalLM", {**GROUPED, "sliding_window": 4}),
    "Phi-3": Family("Phi3", "ForCausalLM", GROUPED),
    "Mamba": Family("Mamba", "ForCausalLM", {
        "vocab_size": WORDS, "hidden_size": 16, "state_size": 4, "num_hidden_layers": 4,
        **_SPECIAL}),
    "T5": Family("T5", "ForConditionalGeneration", {
        "vocab_size": WORDS, "d_model": 16, "d_kv": 4, "d_ff": 32, "num_layers": 2, "num_heads": 4,
        "dropout_rate": 0.0, "decoder_start_token_id": 0, "pad_token_id": 0}, translation, 1e-9),
    "BART": Family("Bart", "ForConditionalGeneration", _SEQ2SEQ, translation, 1e-9),
    "mBART": Family("MBart", "ForConditionalGeneration", _SEQ2SEQ, translation, 1e-9),
    "Whisper": Family("Whisper", "ForConditionalGeneration", {
        **{k: v for k, v in _SEQ2SEQ.items() if k != "max_position_embeddings"},
        "num_mel_bins": 8, "max_source_positions": 8, "max_target_positions": 64}, speech, 1e-9),
    "BERT": Family("Bert", "ForMaskedLM", {**SMALL, **_NO_DROPOUT}, hidden_words, 1e-9),
    "RoBERTa": Family("Roberta", "ForMaskedLM", {**SMALL, **_NO_DROPOUT}, hidden_words, 1e-9),
    "ViT": Family("ViT", "ForImageClassification",
                  {**_IMAGES, "num_labels": 3, **_NO_DROPOUT}, images, 1e-9),
    "Swin": Family("Swin", "ForImageClassification", {
        "image_size": 32, "patch_size": 2, "embed_dim": 8, "depths": [2, 2], "num_heads": [4, 4],
        "window_size": 4, "num_labels": 3, "drop_path_rate": 0.0, **_NO_DROPOUT}, images, 1e-9),
    "CLIP": Family("CLIP", "Model", {
        "text_config": {**SMALL, "num_hidden_layers": 2},
        "vision_config": {**_IMAGES, "num_hidden_layers": 2}, "projection_dim": 8},
        captions, 1e-9, {"return_loss": True}),
}  # fmt: skip
"""The families, by their names in papers."""
