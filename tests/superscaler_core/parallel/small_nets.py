"""A small model with values of every kind that may change between steps."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Four layers, and a loss that depends on numbers, a config, a list and a buffer."""

    scale = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.act: nn.Module = nn.Tanh()
        self.drop = nn.Dropout(0.0)
        self.beta = 1.0
        self.unread = 0
        self.config = SimpleNamespace(gain=2.0)
        self.factors = [1.0, 3.0]
        self.mask = torch.ones(6, dtype=torch.float64)
        self.register_buffer("shift", torch.ones(6))
        self.register_buffer("folded", torch.ones(6), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.act(layer(x)) * self.beta
        x = self.drop(x) * (self.folded * 2) * self.mask * self.factors[1]
        self.seen = x.detach()
        return (x * self.scale * self.config.gain).square().mean()


def net(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net().double()


def batch(size: int = 8) -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, dtype=torch.float64, generator=generator)
