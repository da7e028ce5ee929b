"""Alpa's intra-op planner on the spaces of models: the cuts that people found by hand."""

from __future__ import annotations

from functools import cache
from itertools import product
from typing import Any

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import PROFILES
from superscaler_core.models import MODELS
from superscaler_core.planners.alpa_intra import alpa_intra
from superscaler_core.planners.space import PricedSpace, Space, brute_force, price_space
from superscaler_core.simulator import simulate

GPT = {"sequence": 32, "layers": 2, "width": 1024, "heads": 8, "vocabulary": 64}
MOE = {
    "sequence": 64, "layers": 2, "width": 512, "heads": 8, "vocabulary": 64, "experts": 8,
    "capacity_factor": 1.25, "top": 1,
}  # fmt: skip
MLP = {"layers": 2, "inputs": 1024, "hidden": 4096, "outputs": 1024}


@cache
def graph(model: str, batch: int, **sizes: Any) -> ss.Graph:
    kind = MODELS[model]
    config = kind.config(**sizes)
    with torch.device("meta"):
        module = kind.build(config)
    inputs = kind.example_inputs(config, batch, torch.Generator().manual_seed(0))
    return ss.capture(module, tuple(x.to("meta") for x in inputs))


def host(num: int) -> rv.Topology:
    return rv.Topology.single_host(num, 5e-6, 100e9)


def priced(model: str, batch: int, num: int = 4, **sizes: Any) -> PricedSpace:
    profile = PROFILES["a100"]
    return price_space(graph(model, batch, **sizes), range(num), host(num), profile, mesh=(num,))


def chosen(space: PricedSpace) -> dict[str, str]:
    """The choice of every node, by its name, without the number of pieces."""
    nodes = space.space.nodes
    pairs = zip(nodes, alpa_intra(space.space).assignment, strict=True)
    return {node.name: node.choices[i].partition("/")[0] for node, i in pairs}


@pytest.mark.parametrize("batch", [8, 512, 32768])
@pytest.mark.parametrize("layers", [2, 3])
def test_it_is_the_best_of_all_cuts(batch: int, layers: int) -> None:
    space = priced("mlp", batch, 2, **{**MLP, "layers": layers}).space
    best = brute_force(space)
    # Sums of the same numbers in another order.
    assert alpa_intra(space).secs == pytest.approx(best.secs, rel=1e-12)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_it_is_the_best_of_all_cuts_that_fit(share: float) -> None:
    free = priced("mlp", 8192, 2, **MLP).space
    least = min(map(free.bytes, product(*(range(node.num_choices) for node in free.nodes))))
    limit = least + share * (free.bytes(brute_force(free).assignment) - least)
    space = Space(free.nodes, free.edges, memory_bytes=limit)
    assert alpa_intra(space).secs == pytest.approx(brute_force(space).secs, rel=1e-9)


def test_it_cuts_an_mlp_of_few_samples_as_megatron_does() -> None:
    """The first map by its results, the second by what it sums over: one all-reduce."""
    found = chosen(priced("mlp", 8, **MLP))
    assert (found["layers.0:linear"], found["layers.1:linear"]) == ("n", "k")


def test_it_cuts_attention_and_mlp_of_few_tokens_as_megatron_does() -> None:
    found = chosen(priced("gpt", 4, **GPT))
    assert found["layers.0.attn.q:linear"] == "n"
    assert found["layers.0.attn.out:linear"] == "k"
    assert found["layers.0.mlp.up:linear"] == "n"
    assert found["layers.0.mlp.down:linear"] == "k"


@pytest.mark.parametrize("model, batch, sizes", [("mlp", 32768, MLP), ("gpt", 512, GPT)])
def test_it_cuts_the_batch_where_that_is_large(
    model: str, batch: int, sizes: dict[str, Any]
) -> None:
    found = chosen(priced(model, batch, **sizes))
    assert {choice for name, choice in found.items() if name.endswith("linear")} == {"b"}


def test_it_gives_experts_to_devices_and_cuts_the_rest_by_the_batch() -> None:
    found = chosen(priced("moe", 64, **MOE))
    experts = {choice for name, choice in found.items() if "experts:einsum" in name}
    assert experts == {"e"}
    assert found["layers.0.attn.q:linear"] == found["layers.0.mlp.up:linear"] == "b"


@pytest.mark.parametrize("model, batch, sizes", [("gpt", 4, GPT), ("moe", 64, MOE)])
def test_its_step_is_the_simulated_one(model: str, batch: int, sizes: dict[str, Any]) -> None:
    space = priced(model, batch, **sizes)
    found = alpa_intra(space.space)
    plan = ss.Plan(graph(model, batch, **sizes), range(4))
    space.fill(plan, found.assignment)
    made = ss.compile(plan, topology=host(4))
    assert found.secs == pytest.approx(simulate(made, "a100").secs, rel=0.05)
