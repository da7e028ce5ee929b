"""Sampled text on processes is that of one device with the same seed, under every plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

import superscaler_core as ss
from tests.dist.world import Worlds

pytestmark = pytest.mark.dist

PLANS = ("zero3", "megatron", "one_f_one_b:microbatches=2")
OPTIONS = {"max_new_tokens": 8, "do_sample": True, "temperature": 0.9, "top_k": 20, "top_p": 0.9}


def model() -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, eos_token_id=2, pad_token_id=0,
        )
    ).eval()  # fmt: skip


def prompts() -> Tensor:
    return torch.randint(3, 64, (8, 5), generator=torch.Generator().manual_seed(1))


def sampled(made: Any) -> Tensor:
    torch.manual_seed(7)
    return made.generate(input_ids=prompts(), attention_mask=torch.ones(8, 5).long(), **OPTIONS)


def on_rank(rank: int) -> tuple[list[Tensor], str]:
    ids = torch.arange(32).view(8, 4)
    batch = {"input_ids": ids, "labels": ids}
    found = []
    for plan in PLANS:
        parallel = ss.parallelize(model(), kwargs=batch, plan=plan)
        found.append(sampled(parallel))
    torch.manual_seed(rank)
    try:
        parallel.generate(input_ids=prompts(), **OPTIONS)
    except ValueError as error:
        return found, str(error)
    return found, ""


def test_sampled_text_is_that_of_one_device_and_other_seeds_are_refused(worlds: Worlds):
    expected = sampled(model())
    for found, error in worlds(2, timeout_secs=60).run(on_rank):
        assert all(torch.equal(text, expected) for text in found)
        assert "torch's random state" in error
