"""Generated text is that of one device, token by token, and caches lie where the plan cuts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GenerationConfig,
    GPT2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
    ViTConfig,
    ViTForImageClassification,
)

import superscaler_core as ss
from tests.covering import each_value
from tests.superscaler_core.parallel.threads import on_threads

_SMALL = {"vocab_size": 64, "use_cache": False, "bos_token_id": 1, "eos_token_id": 2,
          "pad_token_id": 0}  # fmt: skip
_LLAMA = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, **_SMALL,
}  # fmt: skip

CONFIGS: dict[str, PretrainedConfig] = {
    "Llama": LlamaConfig(**_LLAMA),
    "Mixtral": MixtralConfig(num_local_experts=4, **_LLAMA),
    "GPT-2": GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=64, **_SMALL),
    "Phi-3": Phi3Config(**{**_LLAMA, "num_key_value_heads": 4}),
    "Qwen3": Qwen3Config(head_dim=8, **_LLAMA),
}

PLANS = {
    "zero3": 2,
    "megatron": 2,
    "hybrid:tp=2,microbatches=2": 4,
    "one_f_one_b:microbatches=2": 2,
    "hybrid:pp=2,microbatches=2,tp=2": 4,
}


def seeded(config: PretrainedConfig) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def prompts() -> dict[str, Tensor]:
    """Eight prompts of three lengths, padded on the left."""
    ids = torch.randint(3, 64, (8, 6), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row, length in enumerate((0, 2, 4, 0, 1, 3, 2, 0)):
        ids[row, :length], mask[row, :length] = 0, 0
    return {"input_ids": ids, "attention_mask": mask}


def batch() -> dict[str, Tensor]:
    ids = torch.arange(96).view(12, 8) % 64
    return {"input_ids": ids, "labels": ids}


@each_value(family=[*CONFIGS, "Llama", "Mixtral"], plan=PLANS)
def test_greedy_text_is_that_of_one_device(family, plan):
    model, given = seeded(CONFIGS[family]), prompts()
    expected = model.generate(**given, max_new_tokens=9, do_sample=False)

    def work(parallel: ss.Parallel) -> list[Tensor]:
        short = {name: value[:4, -3:] for name, value in given.items()}
        return [
            parallel.generate(**given, max_new_tokens=9, do_sample=False),
            parallel.generate(**short, max_new_tokens=2, do_sample=False),
        ]

    for text, other in on_threads(model, batch(), PLANS[plan], work, plan=plan).values():
        assert torch.equal(text, expected)
        assert other.shape[0] == 4


def test_texts_end_where_the_model_says_so():
    model, given = seeded(CONFIGS["Llama"]), prompts()
    first = model.generate(**given, max_new_tokens=9, do_sample=False)
    model.generation_config.eos_token_id = int(first[0, 8])
    expected = model.generate(**given, max_new_tokens=9, do_sample=False)
    assert not torch.equal(first, expected)
    found = on_threads(
        model, batch(), 2, lambda p: p.generate(**given, max_new_tokens=9, do_sample=False),
        plan="megatron",
    )  # fmt: skip
    assert torch.equal(found[0], expected)


@pytest.mark.parametrize(("plan", "heads", "samples"), [("megatron", 1, 8), ("zero3", 2, 4)])
def test_caches_lie_where_the_plan_cuts_heads_and_samples(plan, heads, samples):
    def work(parallel: ss.Parallel) -> list[tuple[int, ...]]:
        parallel.generate(**prompts(), max_new_tokens=3, do_sample=False)
        return [tuple(x.tensor.shape) for x in parallel._last.carried.values()]

    for shapes in on_threads(seeded(CONFIGS["Llama"]), batch(), 2, work, plan=plan).values():
        assert shapes == [(1, samples, heads, 32, 8)] * 4


def test_caches_of_a_layer_lie_in_its_stage():
    def work(parallel: ss.Parallel) -> dict[str, tuple[int, ...]]:
        parallel.generate(**prompts(), max_new_tokens=3, do_sample=False)
        return {n: tuple(x.tensor.shape) for n, x in parallel._last.carried.items() if x.box.lo[1:]}

    plan = "one_f_one_b:microbatches=2"
    found = on_threads(seeded(CONFIGS["Llama"]), batch(), 2, work, plan=plan)
    assert {rank: {*kept} for rank, kept in found.items()} == {
        0: {"kv 0", "kv 1"}, 1: {"kv 2", "kv 3"},
    }  # fmt: skip


def test_text_follows_what_steps_have_trained():
    given = prompts()

    def work(parallel: ss.Parallel) -> list[Tensor]:
        first = parallel.generate(**given, max_new_tokens=5, do_sample=False)
        optimizer = torch.optim.SGD(parallel.parameters(), lr=1.0)
        for _ in range(3):
            parallel.step(**batch())
            optimizer.step()
            optimizer.zero_grad()
        return [first, parallel.generate(**given, max_new_tokens=5, do_sample=False)]

    found = on_threads(seeded(CONFIGS["Llama"]), batch(), 2, work, plan="zero3")[1]
    alone = seeded(CONFIGS["Llama"])
    assert torch.equal(found[0], alone.generate(**given, max_new_tokens=5, do_sample=False))
    optimizer = torch.optim.SGD(alone.parameters(), lr=1.0)
    for _ in range(3):
        alone(**batch()).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    expected = alone.generate(**given, max_new_tokens=5, do_sample=False)
    assert torch.equal(found[1], expected)
    assert not torch.equal(expected, found[0])


def test_options_may_be_a_configuration_by_position():
    model, ids = seeded(CONFIGS["Llama"]), prompts()["input_ids"]
    config = GenerationConfig(max_new_tokens=40, eos_token_id=2, pad_token_id=0)
    found = on_threads(model, batch(), 1, lambda p: p.generate(ids, config))
    assert torch.equal(found[0], model.generate(ids, config))


def test_other_prompts_on_a_rank_are_refused_on_all():
    ids = prompts()["input_ids"]

    def work(parallel: ss.Parallel) -> str:
        own = ids if parallel.trainer.rank else ids.flip(0)
        with pytest.raises(ValueError, match="'input_ids' has other values on rank 1") as caught:
            parallel.generate(input_ids=own, max_new_tokens=3, do_sample=False)
        return str(caught.value)

    found = on_threads(seeded(CONFIGS["Llama"]), batch(), 2, work)
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("config", "options", "match"),
    [
        (CONFIGS["Llama"], {"num_beams": 2}, "num_beams is 1"),
        (CONFIGS["Llama"], {"max_time": 1.0}, "max_time=1.0: ranks would stop at different"),
        (CONFIGS["Llama"], {"output_hidden_states": True}, "output_hidden_states=True: call the"),
        (CONFIGS["Llama"], {"assistant_model": torch.nn.Linear(1, 1)}, "assistant_model=Linear"),
        (CONFIGS["Llama"], {"guidance_scale": 1.5}, "guidance_scale=1.5"),
        (
            BloomConfig(hidden_size=32, n_layer=1, n_head=4, **_SMALL),
            {},
            "cannot run BloomForCausal",
        ),
        (MistralConfig(sliding_window=16, **_LLAMA), {"max_new_tokens": 30}, "to the last 16"),
    ],
)
def test_what_needs_another_cache_is_refused(config, options, match):
    given = {"max_new_tokens": 3, "do_sample": False, **options}
    with pytest.raises(ss.PlanError, match=match):
        on_threads(seeded(config), batch(), 1, lambda p: p.generate(**prompts(), **given))


def test_model_that_is_none_of_text_has_no_generate():
    config = ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2,
                       intermediate_size=16, image_size=8, patch_size=4)  # fmt: skip
    given = {"pixel_values": torch.zeros(2, 3, 8, 8), "labels": torch.zeros(2, dtype=torch.long)}
    with pytest.raises(ss.PlanError, match="ViTForImageClassification has no generate"):
        on_threads(ViTForImageClassification(config), given, 1, lambda p: p.generate())
