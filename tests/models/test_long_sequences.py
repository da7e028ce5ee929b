"""Language models on the meta device, with long sequences: their graphs hold small constants."""

import pytest
import torch

import superscaler_core as ss
from tests.models.libraries import transformers

NUM_TOKENS = 4096


def meta(name, **sizes):
    config = getattr(transformers, f"{name}Config")(
        hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=64, max_position_embeddings=NUM_TOKENS, **sizes,
    )  # fmt: skip
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(config)


@pytest.mark.parametrize("name", ["Llama", "Gemma2"])
def test_constants_grow_with_the_sequence_and_not_with_its_square(name):
    ids = torch.zeros(2, NUM_TOKENS, dtype=torch.long, device="meta")
    kwargs = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids}
    graph = ss.capture(meta(name), kwargs=kwargs)
    assert max(value.nbytes for value in graph.constants.values()) <= 8 * NUM_TOKENS
    masks = {t.shape for op in graph.ops if op.kind == "attention" for t in op.inputs[3:]}
    assert name == "Gemma2" or masks == {(2, 1, NUM_TOKENS, NUM_TOKENS)}
