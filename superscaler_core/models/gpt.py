"""GPT-3 style decoder: pre-norm blocks of causal attention and a GELU MLP."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from superscaler_core.rules.register import register_op


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a GPT.

    Attributes:
        vocabulary: number of tokens.
        sequence: length of a sequence, in tokens.
        layers: number of blocks.
        width: width of the hidden state.
        heads: number of heads of the attention; divides the width.
        dropout: probability, for the embedding and both branches of a block.
        tied: whether the head shares the embedding's weight.
        fused: whether attention is one kernel, which keeps no matrix of queries times keys;
            otherwise it is written out as products and a softmax.
    """

    vocabulary: int = 50257
    sequence: int = 2048
    layers: int = 24
    width: int = 2048
    heads: int = 32
    dropout: float = 0.0
    tied: bool = False
    fused: bool = True

    @classmethod
    def presets(cls) -> dict[str, GPTConfig]:
        """``tiny`` for tests; the others are those of the paper's co-shard study."""
        return {
            "tiny": cls(vocabulary=40, sequence=8, layers=2, width=16, heads=4),
            "1.3B": cls(layers=24, width=2048, heads=32),
            "6.7B": cls(layers=32, width=4096, heads=32),
            "15B": cls(layers=48, width=5120, heads=40),
        }


@register_op("b h q k, q, k -> b h q k", saves=())
def hide_later(scores: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Hide keys that come later than their query.

    Args:
        scores: scores of the attention, ``[batch, heads, queries, keys]``.
        queries, keys: their places in the sequence, ``[queries]`` and ``[keys]``.

    Returns:
        The scores, ``-inf`` where a key comes later than the query.
    """
    # Added, so that autograd keeps nothing as large as the scores.
    mask = torch.zeros((), dtype=scores.dtype, device=scores.device).masked_fill(
        keys > queries[:, None], float("-inf")
    )
    return scores + mask


class Attention(nn.Module):
    """Self-attention, ``[batch, sequence, width]`` to the same; causal unless said otherwise."""

    def __init__(self, width: int, heads: int, *, fused: bool = True, causal: bool = True) -> None:
        super().__init__()
        assert causal or fused, "attention that is written out hides later keys"
        self.heads, self.fused, self.causal = heads, fused, causal
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (self._heads(line(x)) for line in (self.q, self.k, self.v))
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        else:
            places = torch.arange(x.shape[1], device=x.device)
            scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
            mixed = hide_later(scores, places, places).softmax(-1) @ v
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class MLP(nn.Module):
    """Two linear maps with GELU between them."""

    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, inner)
        self.down = nn.Linear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down(F.gelu(self.up(x)))
        return y


class Block(nn.Module):
    """One layer: attention, then MLP, each behind a norm and around a residual."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config.width, config.heads, fused=config.fused)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width, 4 * config.width)
        self.dropout = config.dropout

    def forward(self, x: Tensor) -> Tensor:
        x = x + self._dropped(self.attn(self.norm1(x)))
        return x + self._dropped(self.mlp(self.norm2(x)))

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class GPT(nn.Module):
    """Decoder with a language-model loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        if config.tied:
            self.head.weight = self.embed.weight
        self.apply(initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """Mean cross entropy, in float32 or wider.

        Args:
            tokens: int64 ``[batch, sequence]``.
            targets: the token that follows each, of the same shape.
        """
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.position(places)
        x = F.dropout(x, self.config.dropout, self.training)
        for layer in self.layers:
            x = layer(x)
        scores = self.head(self.norm(x))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        # Classes as dim 1, not flattened: so batch and sequence stay loops that can be cut.
        return F.cross_entropy(scores.transpose(1, 2), targets)


def initialize(module: nn.Module) -> None:
    """GPT-2's start: weights of standard deviation 0.02, biases of zero."""
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)


def example_inputs(
    config: GPTConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random tokens and targets."""
    shape = (batch, config.sequence)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)
    return tokens, torch.randint(config.vocabulary, shape, generator=generator)
