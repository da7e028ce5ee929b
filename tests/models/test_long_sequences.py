"""Language models on the meta device, with long sequences: their graphs hold small constants."""

import pytest
import torch

import superscaler_core as ss
from tests.models.libraries import transformers


def meta(name, **sizes):
    config = getattr(transformers, f"{name}Config")(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=1 << 14, **sizes,
    )  # fmt: skip
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config)


def captured(name, num_tokens, *, is_padded):
    ids = torch.zeros(2, num_tokens, dtype=torch.long, device="meta")
    mask = {"attention_mask": torch.ones_like(ids)} if is_padded else {}
    graph = ss.capture(meta(name), kwargs={"input_ids": ids, "labels": ids, **mask})
    masks = {t.shape for op in graph.ops if op.kind == "attention" for t in op.inputs[3:]}
    assert name == "Gemma2" or masks == {(2, 1, num_tokens, num_tokens)}
    return graph


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_attention_masks_are_shared_constants_of_batch_size_1(name, is_padded):
    graph = captured(name, 4096, is_padded=is_padded)
    sizes = [tuple(value.shape) for value in graph.constants.values() if value.numel() > 1 << 16]
    # The mask, one of windows, and the two rotary tables, which all layers share.
    masks = [(1, 1, 4096, 4096)] * (2 if name == "Gemma2" else 1)
    assert sorted(sizes) == sorted([*masks, *[(1, 1, 4096, 64)] * 2])


@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_mask_of_a_long_sequence_is_not_stored_as_a_constant(name, is_padded):
    graph = captured(name, 1 << 14, is_padded=is_padded)
    assert max(value.nbytes for value in graph.constants.values()) == (1 << 14) * 64 * 4
