"""Multi-layer perceptron."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn


@dataclass(frozen=True)
class MLPConfig:
    """Sizes of an MLP.

    Attributes:
        inputs, outputs: width of the first and the last layer.
        hidden: width of the layers between.
        layers: number of linear maps.
        has_classes: cross entropy against classes; otherwise mean squared error.
    """

    inputs: int = 1024
    hidden: int = 1024
    outputs: int = 1024
    layers: int = 8
    has_classes: bool = False

    @classmethod
    def presets(cls) -> dict[str, MLPConfig]:
        """``tiny`` and ``tiny-classes`` for tests."""
        return {
            "tiny": cls(inputs=6, hidden=12, outputs=4, layers=3),
            "tiny-classes": cls(inputs=6, hidden=12, outputs=5, layers=2, has_classes=True),
            "8x1024": cls(),
        }


class MLPModel(nn.Module):
    """Linear maps with GELU between them, and a loss."""

    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        widths = [config.inputs, *[config.hidden] * (config.layers - 1), config.outputs]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        """Mean loss.

        Args:
            x: ``[batch, inputs]``.
            target: ``[batch, outputs]``, or int64 ``[batch]`` of classes.
        """
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        x = self.layers[-1](x)
        return F.cross_entropy(x, target) if self.config.has_classes else F.mse_loss(x, target)


def example_inputs(
    config: MLPConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Normally distributed inputs; targets likewise, or classes."""
    x = torch.randn(batch, config.inputs, generator=generator)
    if config.has_classes:
        return x, torch.randint(config.outputs, (batch,), generator=generator)
    return x, torch.randn(batch, config.outputs, generator=generator)
