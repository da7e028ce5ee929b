"""mBART: attention masks, order of execution, and published numbers of parameters."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

import superscaler_core as ss
from superscaler_core.models import build, config_of, example_inputs
from superscaler_core.published.models.mbart import TASKS, DecoderLayer, EncoderLayer

CONFIG = config_of("mbart")


@cache
def graph_of(task: str) -> ss.Graph:
    torch.manual_seed(0)
    return ss.capture(build("mbart", task=task), example_inputs("mbart", 2, task=task))


def reached(y: Tensor, token: int, x: Tensor) -> list[int]:
    """The tokens of ``x`` on which token ``token`` of ``y`` depends."""
    (grad,) = torch.autograd.grad(y[:, token].square().sum(), x, retain_graph=True)
    return grad.abs().sum((0, 2)).nonzero().flatten().tolist()


@pytest.mark.parametrize("task", TASKS)
def test_encoder_and_decoder_blocks_run_after_their_embeddings(task: str) -> None:
    modules = [op.module for op in graph_of(task).ops]
    parts = dict.fromkeys(".".join(module.split(".")[:2]) for module in modules)
    blocks = [part for part in parts if part.startswith("layers.")]
    assert blocks == [f"layers.{i}" for i in range(2 * CONFIG.layers)]
    first, second = (i for i, module in enumerate(modules) if module == "embed")
    assert first == 0
    assert modules[second - 1] == "encoder_norm"
    assert modules.index(f"layers.{CONFIG.layers}.norm1") > second


@pytest.mark.parametrize(("task", "num_readers"), [("classification", 2), ("translation", 3)])
def test_embeddings_and_head_share_one_weight(task: str, num_readers: int) -> None:
    graph = graph_of(task)
    large = [t for t in graph.parameters.values() if CONFIG.vocabulary in t.shape]
    assert large == [graph.parameter("embed.weight")]
    assert len(graph.readers[large[0]]) == num_readers
    assert graph.aliases == ({"head.weight": "embed.weight"} if num_readers == 3 else {})


def test_decoder_layer_is_causal_and_encoder_layer_is_not() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, CONFIG.target_sequence, CONFIG.width, requires_grad=True)
    memory = torch.randn(1, CONFIG.sequence, CONFIG.width, requires_grad=True)
    assert reached(EncoderLayer(CONFIG)(memory), 3, memory) == list(range(CONFIG.sequence))
    decoded = DecoderLayer(CONFIG)(x, memory)
    assert reached(decoded, 3, x) == [0, 1, 2, 3]
    assert reached(decoded, 3, memory) == list(range(CONFIG.sequence))


@pytest.mark.parametrize(("preset", "billions"), [("2-gpus", 1.76), ("32-gpus", 39.3)])
def test_presets_have_the_expected_parameter_counts(preset: str, billions: float) -> None:
    """An MLP has 8 d^2 parameters, an attention 4 d times 64 per head, the embedding 500,000 d."""
    with torch.device("meta"):
        model = build("mbart", preset)
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize("task", TASKS)
def test_source_and_target_sequences_are_detected_as_token_dims(task: str) -> None:
    plan = ss.Plan(graph_of(task), range(2))
    assert plan.blocks.tokens == (plan.dims.of("source", 1), plan.dims.of("target", 1))


@pytest.mark.parametrize(("task", "is_scored"), [("classification", False), ("translation", True)])
def test_only_the_translation_task_scores_words(task: str, is_scored: bool) -> None:
    plan = ss.Plan(graph_of(task), range(2))
    last = plan.blocks.scored
    assert (last < len(plan.graph.ops)) is is_scored
    if is_scored:
        assert CONFIG.vocabulary in plan.graph.ops[last].outputs[0].shape


def test_unknown_task_raises_value_error_listing_known_tasks() -> None:
    with pytest.raises(ValueError, match="no task 'summary'; it has classification, translation"):
        build("mbart", task="summary")
