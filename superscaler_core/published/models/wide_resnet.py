"""Wide residual network: ResNet of bottleneck blocks whose inner widths are multiplied.

Batch norms keep no running statistics: they would change in the forward pass.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from superscaler_core.models import Model

_EXPANSION = 4


@dataclass(frozen=True)
class WideResNetConfig:
    """Sizes of a wide ResNet.

    Attributes:
        blocks: number of blocks of every stage; the image is halved between stages.
        base: channels of the stem.
        width_factor: factor of the inner width of a block.
        classes: number of classes.
        image: height and width of an image, in pixels.
        narrow_entry: whether the first convolution of a block keeps the width that is not
            multiplied, as in the models that Alpa trains.
    """

    blocks: tuple[int, ...] = (3, 4, 6, 3)
    base: int = 64
    width_factor: int = 2
    classes: int = 1000
    image: int = 224
    narrow_entry: bool = False

    @classmethod
    def presets(cls) -> dict[str, WideResNetConfig]:
        """``tiny`` for tests; ``50-2`` and ``101-2`` are those of the paper on wide ResNets."""
        return {
            "tiny": cls(blocks=(1, 1), base=4, width_factor=2, classes=5, image=16),
            "50-2": cls(),
            "101-2": cls(blocks=(3, 4, 23, 3)),
        }


def _norm(channels: int) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, track_running_stats=False)


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolution around a residual."""

    def __init__(self, channels: int, entry: int, width: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, entry, 1, bias=False)
        self.norm1 = _norm(entry)
        self.conv2 = nn.Conv2d(entry, width, 3, stride, padding=1, bias=False)
        self.norm2 = _norm(width)
        self.conv3 = nn.Conv2d(width, out, 1, bias=False)
        self.norm3 = _norm(out)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels != out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out, 1, stride, bias=False), _norm(out)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        y = F.relu(self.norm2(self.conv2(y)))
        return F.relu(self.norm3(self.conv3(y)) + self.shortcut(x))


class WideResNet(nn.Module):
    """Image classifier with a cross-entropy loss."""

    def __init__(self, config: WideResNetConfig) -> None:
        super().__init__()
        self.config = config
        self.stem = nn.Conv2d(3, config.base, 7, 2, padding=3, bias=False)
        self.norm = _norm(config.base)
        blocks: list[nn.Module] = []
        channels = config.base
        for stage, count in enumerate(config.blocks):
            width = config.base * 2**stage
            for i in range(count):
                stride = 2 if stage > 0 and i == 0 else 1
                wide, out = width * config.width_factor, width * _EXPANSION
                entry = width if config.narrow_entry else wide
                blocks.append(Bottleneck(channels, entry, wide, out, stride))
                channels = out
        self.layers = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, config.classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy.

        Args:
            images: ``[batch, 3, image, image]``.
            labels: int64 ``[batch]``.
        """
        x = F.max_pool2d(F.relu(self.norm(self.stem(images))), 3, 2, padding=1)
        for layer in self.layers:
            x = layer(x)
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        return F.cross_entropy(self.head(x), labels)


def example_inputs(
    config: WideResNetConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Normally distributed pixels and random labels."""
    images = torch.randn(batch, 3, config.image, config.image, generator=generator)
    return images, torch.randint(config.classes, (batch,), generator=generator)


MODEL = Model(WideResNetConfig, WideResNet, example_inputs)
