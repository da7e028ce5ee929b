"""Megatron's GPT as it ran in 2021 to 2022: its fused kernels are ops of their own here.

Sources: NVIDIA/Megatron-LM ``megatron/model`` (v2.x): one product for queries, keys and values; a
kernel that scales, masks and normalizes scores; bias and GELU, and bias, dropout and residual sum,
each joined by a JIT; products of attention that read strided operands without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from superscaler_core.rules.register import register_op


@dataclass(frozen=True)
class MegatronConfig:
    """Sizes of a GPT; all dropouts have one probability."""

    layers: int
    width: int
    heads: int
    sequence: int = 1024
    vocabulary: int = 50257
    dropout: float = 0.1


@register_op("b s h+, n t^ d^ h+, n t^ d^ -> b n t^ s d^", saves=(0, 1), launches=(1, 3))
def query_key_value(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Queries, keys and values of every head, by one product."""
    made = F.linear(x, weight.flatten(0, 2), bias.flatten())
    return made.unflatten(-1, bias.shape).permute(0, 2, 3, 1, 4)


@register_op("b n q d+, b n k d+ -> b n q k", saves=(0, 1), launches=(1, 2))
def scores_of(q: Tensor, k: Tensor) -> Tensor:
    """Scores of attention; the product reads its strided operands as they are."""
    return q @ k.transpose(-1, -2)


@register_op("b n q k+, b n k+ d -> b n q d", saves=(0, 1), launches=(1, 2))
def mixed_by(probs: Tensor, v: Tensor) -> Tensor:
    """Values mixed by probabilities."""
    return probs @ v


@register_op("b n q^ k^ -> b n q^ k^", saves=(1,), launches=(1, 1))
def softmax(scores: Tensor, *, scale: float) -> Tensor:
    """Scaled, masked and normalized scores."""
    num = scores.shape[-1]
    later = torch.ones(num, num, dtype=torch.bool, device=scores.device).triu(1)
    return (scores * scale).masked_fill(later, float("-inf")).softmax(-1)


@register_op("b n s d -> b n s d", saves=(1,), launches=(1, 1))
def dropout_of_probs(x: Tensor, *, p: float) -> Tensor:
    """Dropout, which is one kernel there."""
    return F.dropout(x, p)


@register_op("b s h -> b s h", saves=(1,), launches=(1, 1))
def dropout(x: Tensor, *, p: float) -> Tensor:
    """Dropout, which is one kernel there."""
    return F.dropout(x, p)


@register_op("b s f, f -> b s f", saves=(0, 1), launches=(1, 2))
def bias_gelu(x: Tensor, bias: Tensor) -> Tensor:
    """GELU of a sum with a bias."""
    return F.gelu(x + bias, approximate="tanh")


@register_op("b s h, h, b s h -> b s h", saves=(3,), launches=(1, 2))
def bias_dropout_add(x: Tensor, bias: Tensor, residual: Tensor, *, p: float) -> Tensor:
    """A residual with what dropout leaves of a sum with a bias."""
    return residual + F.dropout(x + bias, p)


@register_op("b s v^ -> b s v^", saves=(), launches=(2, 0))
def less_maximum(scores: Tensor) -> Tensor:
    """Scores less their greatest, which has no gradient."""
    return scores - scores.detach().amax(-1, keepdim=True)


@register_op("b s v^ -> b s v^", saves=(1,), launches=(2, 1))
def exponentials(scores: Tensor) -> Tensor:
    """Exponentials, which the backward needs."""
    return scores.exp()


@register_op("b s v^, b s -> b s", dtypes=["float32"], saves=(0,), launches=(5, 3))
def losses_of(powers: Tensor, targets: Tensor) -> Tensor:
    """Cross entropy from the exponentials of scores."""
    given = powers.gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    return powers.sum(-1).log() - given.log()


class Attention(nn.Module):
    """Attention whose scores are written to memory."""

    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        heads, width = config.heads, config.width
        self.p, self.scale = config.dropout, (width // heads) ** -0.5
        self.weight = _parameter(heads, 3, width // heads, width)
        self.bias = _parameter(heads, 3, width // heads)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = query_key_value(x, self.weight, self.bias).unbind(2)
        probs = dropout_of_probs(softmax(scores_of(q, k), scale=self.scale), p=self.p)
        mixed: Tensor = self.out(mixed_by(probs, v).transpose(1, 2).flatten(2))
        return mixed


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.02)


class Layer(nn.Module):
    """Attention and MLP, each behind a norm and around a residual."""

    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        width, self.p = config.width, config.dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.attn_bias = Attention(config), _parameter(width)
        self.up, self.up_bias = nn.Linear(width, 4 * width, bias=False), _parameter(4 * width)
        self.down, self.down_bias = nn.Linear(4 * width, width, bias=False), _parameter(width)

    def forward(self, x: Tensor) -> Tensor:
        x = bias_dropout_add(self.attn(self.norm1(x)), self.attn_bias, x, p=self.p)
        inner = bias_gelu(self.up(self.norm2(x)), self.up_bias)
        return bias_dropout_add(self.down(inner), self.down_bias, x, p=self.p)


class MegatronGPT(nn.Module):
    """Decoder with a language-model loss; the head has weights of its own."""

    def __init__(self, config: MegatronConfig) -> None:
        super().__init__()
        self.p = config.dropout
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy in float32; tokens and targets are int64 ``[batch, sequence]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = dropout(self.embed(tokens) + self.position(places), p=self.p)
        for layer in self.layers:
            x = layer(x)
        # Several passes over the scores in float32 (``mpu/cross_entropy.py``).
        scores = less_maximum(self.head(self.norm(x)).float())
        return losses_of(exponentials(scores), targets).mean()
