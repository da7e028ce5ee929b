"""Waiting MoE: a mixture of experts whose devices compute by waiting."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from bench.machine.waiting import experts_waited, tokens_waited
from superscaler_core.models import top_gating


@dataclass(frozen=True)
class WaitingMoEConfig:
    """Sizes of the model.

    Attributes:
        vocabulary, sequence, layers, width, experts: as in ``MoEConfig``.
        inner: hidden width of an expert.
        capacity: tokens of a sequence that an expert can take.
        dense_nanos: nanoseconds of waiting per element of the input of a layer or of the head,
            ``[B, S, M]``; twice that in the backward.
        expert_nanos: nanoseconds of waiting per element inside the experts, ``[E, G, C, H]``; twice
            that in the backward.
    """

    vocabulary: int = 16
    sequence: int = 64
    layers: int = 3
    width: int = 128
    experts: int = 8
    inner: int = 32
    capacity: int = 8
    dense_nanos: float = 300.0
    expert_nanos: float = 1200.0


class Layer(nn.Module):
    """A layer: a wait instead of attention, then experts, one of which each token chooses."""

    def __init__(self, config: WaitingMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.norm = nn.LayerNorm(config.width)
        self.gate = nn.Linear(config.width, config.experts, bias=False)
        self.up = nn.Parameter(torch.randn(config.experts, config.width, config.inner) / 10)
        self.down = nn.Parameter(torch.randn(config.experts, config.inner, config.width) / 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(tokens_waited(x, nanos=self.config.dense_nanos))
        combine, _ = top_gating(self.gate(h), top=1, capacity=self.config.capacity)
        given = torch.einsum("gsec,gsm->egcm", (combine > 0).to(h.dtype), h)
        hidden = F.gelu(torch.einsum("egcm,emh->egch", given, self.up))
        hidden = experts_waited(hidden, nanos=self.config.expert_nanos)
        made = torch.einsum("egch,ehm->egcm", hidden, self.down)
        return x + torch.einsum("gsec,egcm->gsm", combine, made)


class WaitingMoE(nn.Module):
    """A language model of layers that wait."""

    def __init__(self, config: WaitingMoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """The mean loss of ``[batch, sequence]`` tokens."""
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        x = self.head(tokens_waited(x, nanos=self.config.dense_nanos))
        return F.cross_entropy(x.transpose(1, 2), targets)


def example_inputs(
    config: WaitingMoEConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random tokens and targets."""
    shape = (batch, config.sequence)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)
    return tokens, torch.randint(config.vocabulary, shape, generator=generator)
