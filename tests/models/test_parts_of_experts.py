"""Parts of experts: for every class of experts of transformers, what its parts return adds up."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import superscaler_core as ss

NUM_EXPERTS, HIDDEN, INNER, TOP = 5, 8, 12, 2

DISPATCHES = ("eager", "batched_mm", "grouped_mm")


def _classes() -> dict[str, str]:
    """The classes of experts with stacked weights, each with its module, from their sources."""
    spec = find_spec("transformers.models")
    assert spec is not None
    assert spec.submodule_search_locations
    found = {}
    for folder in spec.submodule_search_locations:
        for path in sorted(Path(folder).glob("*/modeling_*.py")):
            text = path.read_text()
            for name in re.findall(
                r"@use_experts_implementation[^\n]*\nclass (\w+)\(nn\.Module\)", text
            ):
                found[name] = f"transformers.models.{path.parent.name}.{path.stem}"
    return found


CLASSES = _classes()


class _Config:
    """A small configuration that has every attribute, by what its name says."""

    _experts_implementation = "eager"
    hidden_act = hidden_activation = activation_function = mlp_hidden_act = "silu"
    moe_latent_size = None
    swiglu_limit = swiglu_alpha = 7.0

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and "zero" not in name and "_per_" not in name:
            return NUM_EXPERTS
        if "act" in name:
            return "silu"
        if "hidden" in name or "model" in name:
            return HIDDEN
        return INNER if "inter" in name or "ffn" in name or "size" in name else 2


class _Mixture(nn.Module):
    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.experts(x, ids, weights).square().mean()


@pytest.mark.many(8)
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("name", CLASSES)
def test_parts_of_experts_add_up_forward_and_backward(name: str, dispatch: str) -> None:
    torch.manual_seed(0)
    config: Any = _Config()
    config._experts_implementation = dispatch
    experts = getattr(import_module(CLASSES[name]), name)(config)
    for value in experts.parameters():
        nn.init.normal_(value, std=0.3)
    x = torch.randn(8, HIDDEN, requires_grad=True)
    ids = torch.stack([torch.randperm(NUM_EXPERTS)[:TOP] for _ in range(8)])
    weights = torch.rand(8, TOP, requires_grad=True)
    graph = ss.capture(_Mixture(experts), (x, ids, weights))
    (op,) = (op for op in graph.ops if op.kind == name)
    assert "expert" in op.annotation.reductions

    def run(pieces: list[tuple[int, int]]) -> list[torch.Tensor]:
        total = 0
        for lo, hi in pieces:
            given = {p: v[lo:hi] if len(v) == NUM_EXPERTS else v for p, v in state.items()}
            total = total + ss.ops.call_experts(
                key, [x, ids, weights, *given.values()], [tuple(x.shape)],
                first=lo, num_here=hi - lo, num_experts=NUM_EXPERTS,
            )  # fmt: skip
        return [total, *torch.autograd.grad(total.square().sum(), [x, weights, *state.values()])]

    (key,) = op.modules
    state = dict(experts.named_parameters())
    for found, whole in zip(run([(0, 2), (2, 3), (3, 5)]), run([(0, 5)]), strict=True):
        torch.testing.assert_close(found, whole, rtol=1e-4, atol=1e-6)
