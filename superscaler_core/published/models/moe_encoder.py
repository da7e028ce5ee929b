"""HiDup's four models: encoders with a mixture of experts in every second layer.

BERT reads tokens, and predicts every one of them; ViT reads images, and predicts a class. Both have
gates of one expert (Switch) or of the two best (SGMoE, as in GShard), and twice as many experts as
devices.

Source: the public code of HiDup (Zhang et al., SoCC 2022), exp/config.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from superscaler_core.models import Model
from superscaler_core.models.gpt import initialize
from superscaler_core.models.moe import Block, MoEConfig

TOPS: Mapping[str, Mapping[str, Any]] = {
    "sgmoe": {"top": 2, "capacity_factor": 2.5},
    "switch": {"top": 1, "capacity_factor": 1.25},
}
"""The settings of the two gates."""


@dataclass(frozen=True)
class EncoderConfig(MoEConfig):
    """Sizes of an encoder; attention sees all tokens.

    Attributes:
        vocabulary: number of tokens, or of classes of images; those of WikiText-2 are 33,278, which
            HiDup rounds up to a multiple of its devices.
        image: side of an image, in pixels; 0 if inputs are tokens.
        patch: side of a patch; divides the side of an image.
        channels: channels of an image.
    """

    vocabulary: int = 33280
    layers: int = 8
    dropout: float = 0.1
    causal: bool = False
    image: int = 0
    patch: int = 4
    channels: int = 3

    @classmethod
    def presets(cls) -> dict[str, MoEConfig]:
        """HiDup's four models, with the experts of 8 devices, and a tiny one of each for tests."""
        tiny: dict[str, Any] = {"layers": 2, "width": 16, "heads": 4, "experts": 4, "dropout": 0.0}
        # 64 patches, and the token of the class.
        vit: dict[str, Any] = {"image": 32, "sequence": 65, "vocabulary": 10}
        found: dict[str, MoEConfig] = {}
        for gate, sizes in TOPS.items():
            found[f"bert-{gate}"] = cls(**sizes)
            found[f"vit-{gate}"] = cls(**vit, **sizes)
            found[f"tiny-bert-{gate}"] = cls(**tiny, vocabulary=40, sequence=8, **sizes)
            found[f"tiny-vit-{gate}"] = cls(
                **tiny, image=6, patch=2, sequence=10, vocabulary=5, **sizes
            )
        return {"tiny": found["tiny-bert-sgmoe"], **found}


class Tokens(nn.Module):
    """Tokens to vectors, ``[batch, sequence]`` to ``[batch, sequence, width]``."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.table = nn.Embedding(config.vocabulary, config.width)

    def forward(self, tokens: Tensor) -> Tensor:
        x: Tensor = self.table(tokens)
        return x


class Patches(nn.Module):
    """Patches of images to vectors, after a vector for the class.

    ``[batch, channels, side, side]`` to ``[batch, 1 + patches, width]``.
    """

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.conv = nn.Conv2d(config.channels, config.width, config.patch, config.patch)
        self.of_class = nn.Parameter(torch.empty(1, 1, config.width).normal_(std=0.02))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv(images).flatten(2).transpose(1, 2)
        return torch.cat([self.of_class.expand(len(images), -1, -1), patches], 1)


class MoEEncoder(nn.Module):
    """Encoder with cross entropy of every token or of the image, and the experts' balance."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = Patches(config) if config.image else Tokens(config)
        self.position = nn.Embedding(config.sequence, config.width)
        self.layers = nn.ModuleList(Block(config, i % 2 == 1) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(initialize)

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in float32 or wider, plus ``balance`` times that of the experts.

        Args:
            x: tokens ``[batch, sequence]``, or images ``[batch, channels, side, side]``.
            targets: the token at every place, or the class of every image.
        """
        places = torch.arange(self.config.sequence, device=x.device)
        x = self.embed(x) + self.position(places)
        x = F.dropout(x, self.config.dropout, self.training)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances += [] if balance is None else [balance]
        x = self.norm(x)
        scores = self.head(x[:, 0] if self.config.image else x)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        loss = F.cross_entropy(scores if self.config.image else scores.transpose(1, 2), targets)
        for balance in balances:
            loss = loss + self.config.balance * balance
        return loss


def example_inputs(
    config: EncoderConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random tokens with random targets, or normally distributed images with random classes."""
    if not config.image:
        shape = (batch, config.sequence)
        x = torch.randint(config.vocabulary, shape, generator=generator)
        return x, torch.randint(config.vocabulary, shape, generator=generator)
    images = torch.randn(batch, config.channels, config.image, config.image, generator=generator)
    return images, torch.randint(config.vocabulary, (batch,), generator=generator)


MODEL = Model(EncoderConfig, MoEEncoder, example_inputs)
