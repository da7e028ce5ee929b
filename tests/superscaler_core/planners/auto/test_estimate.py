"""Laws of estimates: they are near the simulated values, on links of two speeds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import transformers

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.evaluation import Candidate, Request
from superscaler_core.evaluation.evaluate import evaluate
from superscaler_core.models import GPT, GPTConfig, MoEConfig, MoETransformer, Swin, SwinConfig
from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.estimate import Estimate, Figures
from superscaler_core.planners.auto.families import Filling
from superscaler_core.simulator import PROFILES

SETTINGS = (
    "hybrid dp=8 tp=1 pp=1 samples=1 zero=3 prefetch=1 reductions",
    "hybrid dp=2 tp=2 pp=2 samples=2 zero=1 vocabulary",
    "hybrid dp=2 tp=1 pp=4 samples=1 keep=block_inputs",
    "hybrid dp=4 tp=2 pp=1 samples=2 zero=3 offload keep=block_inputs vocabulary",
    "hybrid dp=4 tp=2 pp=1 samples=2 coshard=2 vocabulary",
    "hybrid dp=8 tp=1 pp=1 samples=2 keep=attention_only",
    "hybrid dp=2 tp=4 pp=1 samples=4 keep=segment_inputs sequence vocabulary",
    "hybrid dp=4 tp=2 pp=1 samples=1 sequence vocabulary zero=3 prefetch=1 reductions moves",
    "hybrid dp=2 tp=1 pp=4 samples=1 schedule=chimera zero=1",
    "hybrid dp=2 tp=1 pp=4 samples=2 chunks=2",
)

SECS, BYTES = 1.08, 1.27
"""Allowed factors between estimates and the simulation, up and down.

The measured factors are 0.95 to 1.07 in time and 0.85 to 1.21 in memory.
"""

FROZEN_SECS = 1.17
"""The allowed factor of time if few weights are trained: estimates recompute weights' gradients."""


@cache
def graph(samples: int, dtype: torch.dtype = torch.float32) -> ss.Graph:
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=8192, sequence=512, layers=8, width=1024, heads=16))
        tokens = torch.empty(samples, 512, dtype=torch.int64)
    return ss.capture(model.to(dtype), (tokens, tokens))


@cache
def images(samples: int) -> ss.Graph:
    """A model whose last blocks have most weights, while all blocks take about the same time."""
    config = SwinConfig(image=256, window=16, width=128, heads=4, depths=(2, 2, 2, 2))
    with torch.device("meta"):
        model = Swin(config).half()
        batch = torch.empty(samples, 3, 256, 256).half(), torch.empty(samples, dtype=torch.int64)
    return ss.capture(model, batch)


@cache
def experts(samples: int) -> ss.Graph:
    config = MoEConfig(512, 256, layers=4, width=512, heads=8, experts=16)
    with torch.device("meta"):
        model = MoETransformer(config)
        tokens = torch.empty(samples, 256, dtype=torch.int64)
    return ss.capture(model, (tokens, tokens))


@cache
def frozen(samples: int) -> ss.Graph:
    """A model of which only biases and norms are trained."""
    with torch.device("meta"):
        model = GPT(GPTConfig(vocabulary=8192, sequence=512, layers=8, width=1024, heads=16))
        tokens = torch.empty(samples, 512, dtype=torch.int64)
    for weight in model.parameters():
        weight.requires_grad_(weight.dim() == 1)
    return ss.capture(model, (tokens, tokens))


@cache
def masked(samples: int) -> ss.Graph:
    """A model whose blocks expand a mask, which has no gradient, between what is recomputed."""
    config = transformers.LlamaConfig(
        hidden_size=1024, intermediate_size=2816, num_hidden_layers=4, num_attention_heads=16,
        vocab_size=8192, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        tokens = torch.empty(samples, 512, dtype=torch.int64)
    return ss.capture(model, kwargs={"input_ids": tokens, "labels": tokens})


def half(samples: int) -> ss.Graph:
    return graph(samples, torch.float16)


REQUEST = Request(
    graph, (1, 2, 4, 8), 64, tuple(range(8)),
    rv.Topology.hosts(
        [range(4), range(4, 8)], intra=rv.Link(5e-6, 120e9), inter=rv.Link(15e-6, 11e9)
    ),
    PROFILES["v100"], 1 << 40,
)  # fmt: skip


def factors(request: Request, text: str) -> tuple[float, float]:
    """The ratios of simulated to estimated seconds and bytes of a setting."""
    setting, estimate = Setting.parse(text), Estimate(request)
    num = request.microbatches(setting.microbatch)
    filling = Filling(setting, request.profile, 0, num)
    seen = evaluate(request, Candidate("", setting.microbatch, filling))
    found = estimate.of(setting)
    return seen.secs / found.secs, seen.peak_bytes / found.num_bytes


MASTERS = {"precision": ss.Precision("float32")}
ZERO3 = "zero=3 prefetch=1 reductions"
# A model, other fields of the request, and a setting.
OTHERS: list[tuple[Callable[[int], ss.Graph], dict[str, ss.Precision], str]] = [
    (half, MASTERS, "hybrid dp=8 tp=1 pp=1 samples=1 zero=1"),
    (half, MASTERS, f"hybrid dp=4 tp=2 pp=1 samples=2 {ZERO3} keep=block_inputs"),
    (images, MASTERS, f"hybrid dp=8 tp=1 pp=1 samples=1 {ZERO3}"),
    (images, MASTERS, "hybrid dp=8 tp=1 pp=1 samples=2 zero=3 keep=block_inputs coshard=2"),
    (frozen, {}, "hybrid dp=8 tp=1 pp=1 samples=1 zero=1"),
    (frozen, {}, f"hybrid dp=4 tp=2 pp=1 samples=2 {ZERO3} keep=block_inputs"),
    (experts, {}, "hybrid dp=8 tp=1 pp=1 samples=1 experts zero=1"),
    (experts, {}, f"hybrid dp=4 tp=2 pp=1 samples=1 experts {ZERO3}"),
    (experts, {}, "hybrid dp=4 tp=1 pp=2 samples=1 experts zero=1"),
    (masked, {}, "hybrid dp=8 tp=1 pp=1 samples=2 zero=1 keep=block_inputs"),
]


ROWS = [*((graph, dict[str, ss.Precision](), text) for text in SETTINGS), *OTHERS]


@pytest.mark.many(10)
@pytest.mark.parametrize(
    "model, more, text", ROWS, ids=[f"{model.__name__}-{text}" for model, _, text in ROWS]
)
def test_estimated_time_and_memory_are_near_the_simulation(
    model: Callable[[int], ss.Graph], more: dict[str, ss.Precision], text: str
) -> None:
    """For master weights, uneven blocks, weights that are not trained, and experts too."""
    secs, num_bytes = factors(replace(REQUEST, graph_of=model, **more), text)
    most = FROZEN_SECS if model is frozen else SECS
    assert 1 / most < secs < most
    assert 1 / BYTES < num_bytes < BYTES


@pytest.mark.parametrize(
    "keep, tp", [("everything", 1), ("segment_inputs", 2), ("block_inputs", 4)]
)
def test_time_of_one_stage_is_that_of_the_simulator(tp: int, keep: str) -> None:
    """They agree but for the first sum of gradients, and for results that need no recomputation."""
    request = replace(REQUEST, devices=tuple(range(tp)))
    secs, _ = factors(request, f"hybrid dp=1 tp={tp} pp=1 samples=1 keep={keep}")
    assert secs == pytest.approx(1, rel=3e-2)


@pytest.mark.parametrize(
    "text",
    [
        "hybrid dp=4 tp=1 pp=2 samples=1 schedule=zero-bubble zero=1",
        "hybrid dp=1 tp=1 pp=8 samples=1 schedule=zero-bubble-h2",
    ],
)
def test_time_of_a_pipeline_is_that_of_the_simulator(text: str) -> None:
    """They agree but for the latency of the last calls, and for ticks."""
    secs, _ = factors(REQUEST, text)
    assert secs == pytest.approx(1, rel=1e-3)


def test_setting_that_cannot_be_cut_is_estimated_to_take_for_ever() -> None:
    assert Estimate(REQUEST).of(Setting(tp=3)) == Figures()


@pytest.mark.parametrize("text", [text for text in SETTINGS if "samples=1" in text])
def test_least_seconds_are_a_bound_of_the_estimate(text: str) -> None:
    """With one sample nothing is interpolated."""
    estimate, setting = Estimate(REQUEST), Setting.parse(text)
    assert 0 < estimate.near(setting).secs <= estimate.of(setting).secs
