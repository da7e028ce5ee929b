"""Transformer with a mixture of experts in every second layer: Switch (top 1) or GShard (top 2).

Each sequence is one group of tokens. The dispatch is a dense product, as in GShard (Lepikhin et
al., 2020): G groups, S tokens of a group, E experts, C places of an expert in a group.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from superscaler_core.models.gpt import MLP, Attention, initialize
from superscaler_core.rules.register import register_op


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a mixture-of-experts transformer.

    Attributes:
        vocabulary, sequence, layers, width, heads: as in ``GPTConfig``.
        experts: number of experts of a layer.
        top: experts of a token, 1 (Switch) or 2 (GShard).
        capacity_factor: places of an expert, divided by its tokens if they were spread evenly.
        balance: weight of the loss that evens out the experts.
        inner_factor: inner width of an MLP or of an expert, divided by ``width``.
        dropout: probability, for the embedding and both branches of a block.
        causal: whether a token attends only to those before it.
    """

    vocabulary: int = 32000
    sequence: int = 128
    layers: int = 12
    width: int = 768
    heads: int = 12
    experts: int = 16
    top: int = 2
    capacity_factor: float = 2.5
    balance: float = 0.01
    inner_factor: int = 4
    dropout: float = 0.0
    causal: bool = True

    @property
    def capacity(self) -> int:
        """Places of an expert in a group."""
        return ceil(self.sequence / self.experts * self.capacity_factor)

    @classmethod
    def presets(cls) -> dict[str, MoEConfig]:
        """``tiny`` and ``tiny-switch`` for tests; the others have HiDup's experts and capacity."""
        tiny: dict[str, Any] = {"vocabulary": 40, "sequence": 8, "layers": 2}
        tiny |= {"width": 16, "heads": 4, "experts": 4}
        return {
            "tiny": cls(**tiny, top=2, capacity_factor=2.5),
            "tiny-switch": cls(**tiny, top=1, capacity_factor=1.25),
            "bert-top2": cls(top=2, capacity_factor=2.5),
            "bert-switch": cls(top=1, capacity_factor=1.25),
        }


@register_op("g s^ e^ -> g s^ e^ c^, g", sizes={"c": "capacity"}, saves=(0, 1))
def top_gating(scores: Tensor, *, top: int, capacity: int) -> tuple[Tensor, Tensor]:
    """Choose experts and places for the tokens of every group.

    A token takes the next place of its best expert and, with ``top`` 2, of its second best after
    all first choices; without a place it is dropped. With ``top`` 2 both weights add up to 1.

    Args:
        scores: ``[G, S, E]``, of any scale.
        top: experts of a token, 1 or 2.
        capacity: places C of an expert in a group.

    Returns:
        Weights ``[G, S, E, C]``, zero where a token has no place; and for each group the mean over
        experts of (share of tokens whose best expert it is) * (mean gate), ``[G]``.

    Source: algorithm 1 of GShard, without its random choice of the second expert.
    """
    gates = scores.softmax(-1)
    experts = gates.topk(top, -1).indices
    chosen = F.one_hot(experts, scores.shape[-1]).to(scores.dtype)
    shares = chosen[:, :, 0].mean(1)
    balance = (shares * gates.mean(1)).mean(-1)
    weights = gates.unsqueeze(2) * chosen
    if top > 1:
        weights = weights / weights.sum((2, 3), keepdim=True)
    # Places are counted over first choices of all tokens, then over second ones.
    ordered = chosen.transpose(1, 2).flatten(1, 2)
    places = (ordered.cumsum(1) - ordered).view(len(scores), top, *scores.shape[1:]).transpose(1, 2)
    # The row of a place beyond the capacity is zero.
    slots = torch.arange(capacity, device=scores.device, dtype=scores.dtype)
    taken = (places.unsqueeze(-1) == slots).to(scores.dtype) * weights.unsqueeze(-1)
    return taken.sum(2), balance


class Experts(nn.Module):
    """The MLPs of all experts: ``[E, G, C, M]`` to the same."""

    def __init__(self, experts: int, width: int, inner: int) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.empty(experts, width, inner).normal_(std=0.02))
        self.down = nn.Parameter(torch.empty(experts, inner, width).normal_(std=0.02))

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.gelu(torch.einsum("egcm,emh->egch", x, self.up))
        return torch.einsum("egch,ehm->egcm", hidden, self.down)


class MoE(nn.Module):
    """A layer of experts, ``[G, S, M]`` to the same and the loss that balances them, ``[]``."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top, self.capacity = config.top, config.capacity
        self.gate = nn.Linear(config.width, config.experts, bias=False)
        self.experts = Experts(config.experts, config.width, config.inner_factor * config.width)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        combine, balance = top_gating(self.gate(x), top=self.top, capacity=self.capacity)
        dispatch = (combine > 0).to(x.dtype)
        y = self.experts(torch.einsum("gsec,gsm->egcm", dispatch, x))
        return torch.einsum("gsec,egcm->gsm", combine, y), balance.mean()


class Block(nn.Module):
    """One layer, with experts in place of the MLP or not."""

    def __init__(self, config: MoEConfig, has_experts: bool) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config.width, config.heads, causal=config.causal)
        self.norm2 = nn.LayerNorm(config.width)
        if has_experts:
            self.moe = MoE(config)
        else:
            self.mlp = MLP(config.width, config.inner_factor * config.width)
        self.has_experts, self.dropout = has_experts, config.dropout

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        x = x + self._dropped(self.attn(self.norm1(x)))
        if not self.has_experts:
            return x + self._dropped(self.mlp(self.norm2(x))), None
        y, balance = self.moe(self.norm2(x))
        return x + self._dropped(y), balance

    def _dropped(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, self.training)


class MoETransformer(nn.Module):
    """Decoder with a language-model loss and the experts' balance."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.sequence, config.width)
        self.layers = nn.ModuleList(Block(config, i % 2 == 1) for i in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        self.apply(initialize)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """As in ``GPT.forward``, plus ``balance`` times the balance of all expert layers."""
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        x = F.dropout(x, self.config.dropout, self.training)
        balances = []
        for layer in self.layers:
            x, balance = layer(x)
            balances += [] if balance is None else [balance]
        scores = self.head(self.norm(x))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        loss = F.cross_entropy(scores.transpose(1, 2), targets)
        for balance in balances:
            loss = loss + self.config.balance * balance
        return loss


def example_inputs(
    config: MoEConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Random tokens and targets."""
    shape = (batch, config.sequence)
    tokens = torch.randint(config.vocabulary, shape, generator=generator)
    return tokens, torch.randint(config.vocabulary, shape, generator=generator)
