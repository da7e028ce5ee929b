"""Captured models, for tests of priced spaces."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import nn

import superscaler_core as ss
from superscaler_core.models import (
    MODELS,
    Block,
    GPTConfig,
    MLPConfig,
    MLPModel,
    build,
    example_inputs,
)


@cache
def captured(model: str, batch: int = 4, dtype: str = "float64", **sizes: Any) -> ss.Graph:
    """The graph of a tiny model of ``MODELS``."""
    torch.manual_seed(0)
    made = build(model, **sizes).to(getattr(torch, dtype))
    inputs = [
        x.to(made.parameters().__next__().dtype) if x.is_floating_point() else x
        for x in example_inputs(model, batch, seed=0, **sizes)
    ]
    return ss.capture(made, tuple(inputs), recycled=MODELS[model].recycled)


class OneBlock(nn.Module):
    """One transformer block with a loss."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.block = Block(GPTConfig(width=width, heads=heads))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.block(x)
        return y.square().mean()


def mlp_on_paper(batch: int, width: int, hidden: int) -> ss.Graph:
    """The graph of an MLP of two linear maps in half precision, captured on the meta device."""
    sizes = MLPConfig(inputs=width, hidden=hidden, outputs=width, layers=2)
    with torch.device("meta"):
        model, x = MLPModel(sizes).half(), torch.empty(batch, width, dtype=torch.float16)
        return ss.capture(model, (x, x))


def block_on_paper(batch: int, tokens: int, width: int, heads: int) -> ss.Graph:
    """The graph of one transformer block in half precision, captured on the meta device."""
    with torch.device("meta"):
        x = torch.empty(batch, tokens, width, dtype=torch.float16)
        return ss.capture(OneBlock(width, heads).half(), (x,))
