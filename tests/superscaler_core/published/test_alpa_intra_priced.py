"""Alpa's intra-op planner on the spaces of models, compared with brute force."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest
import torch

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import PROFILES
from superscaler_core.models import MODELS
from superscaler_core.published.alpa.alpa_intra import alpa_intra
from superscaler_core.space import Space, brute_force, price_space


@cache
def space_of_mlp(batch: int, layers: int) -> Space:
    """An MLP on two devices."""
    kind = MODELS["mlp"]
    config = kind.config(layers=layers, inputs=1024, hidden=4096, outputs=1024)
    with torch.device("meta"):
        module = kind.build(config)
        x, y = torch.empty(batch, 1024), torch.empty(batch, 1024)
    host = rv.Topology.single_host(2, 5e-6, 100e9)
    return price_space(
        ss.CostModel(ss.capture(module, (x, y)), PROFILES["a100"], host), range(2)
    ).space


@pytest.mark.parametrize("batch", [8, 512, 32768])
@pytest.mark.parametrize("layers", [2, 3])
def test_solution_equals_brute_force_on_an_mlp(batch: int, layers: int) -> None:
    space = space_of_mlp(batch, layers)
    # The same numbers are added in another order.
    assert alpa_intra(space).secs == pytest.approx(brute_force(space).secs, rel=1e-12)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.8])
def test_solution_equals_brute_force_under_a_memory_limit(share: float) -> None:
    free = space_of_mlp(8192, 2)
    least = min(map(free.bytes, product(*(range(node.num_choices) for node in free.nodes))))
    limit = least + share * (free.bytes(brute_force(free).assignment) - least)
    space = Space(free.nodes, free.edges, memory_bytes=limit)
    assert alpa_intra(space).secs == pytest.approx(brute_force(space).secs, rel=1e-9)
