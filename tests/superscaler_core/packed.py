"""Blocks whose attention computes q, k and v with one packed linear layer, in several forms."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

WIDTH, HEADS, VOCABULARY, LENGTH = 16, 4, 20, 6

Parts = tuple[Tensor, Tensor, Tensor]


def heads(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], HEADS, -1).transpose(1, 2)


def by_split(packed: Tensor) -> Parts:
    q, k, v = packed.split(WIDTH, dim=2)
    return heads(q), heads(k), heads(v)


def by_chunk(packed: Tensor) -> Parts:
    q, k, v = packed.chunk(3, dim=-1)
    return heads(q), heads(k), heads(v)


def by_unbind(packed: Tensor) -> Parts:
    q, k, v = packed.view(*packed.shape[:2], 3, HEADS, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def by_index(packed: Tensor) -> Parts:
    made = packed.reshape(*packed.shape[:2], 3, HEADS, WIDTH // HEADS).permute(2, 0, 3, 1, 4)
    return made[0], made[1], made[2]


def by_slices(packed: Tensor) -> Parts:
    rows = [packed[..., i * WIDTH : (i + 1) * WIDTH] for i in range(3)]
    return heads(rows[0]), heads(rows[1]), heads(rows[2])


def by_heads(packed: Tensor) -> Parts:
    """Split as in GPT-NeoX: the queries, keys and values of a head are adjacent."""
    made = packed.view(*packed.shape[:2], HEADS, 3 * WIDTH // HEADS).transpose(1, 2)
    q, k, v = made.chunk(3, dim=-1)
    return q, k, v


FORMS: dict[str, Callable[[Tensor], Parts]] = {
    "split": by_split, "chunk": by_chunk, "unbind": by_unbind, "index": by_index,
    "slices": by_slices, "heads": by_heads,
}  # fmt: skip


def flash(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril().logical_not()
    return scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v


class Conv1D(nn.Module):
    """The linear layer of Hugging Face's GPT-2, with a transposed weight."""

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, out) * 0.1)
        self.bias = nn.Parameter(torch.zeros(out))

    def forward(self, x: Tensor) -> Tensor:
        made = torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight)
        return made.view(*x.shape[:-1], -1)


class Packed(nn.Module):
    """Attention with one packed linear layer for q, k and v."""

    def __init__(self, form: str, attend: Callable[..., Tensor], linear: type[nn.Module]) -> None:
        super().__init__()
        self.packed, self.out = linear(WIDTH, 3 * WIDTH), linear(WIDTH, WIDTH)
        self.form, self.attend = form, attend

    def forward(self, x: Tensor) -> Tensor:
        made = self.attend(*FORMS[self.form](self.packed(x)))
        return self.out(made.transpose(1, 2).reshape(x.shape))


class OfTorch(nn.Module):
    """``nn.MultiheadAttention``, which has a packed ``in_proj_weight``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.inner(x, x, x, need_weights=False)[0]
        return made


class Block(nn.Module):
    """Attention and an MLP; in a gated MLP, one linear layer also computes the gate."""

    def __init__(self, attention: nn.Module, linear: type[nn.Module], is_gated: bool) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.mixer, self.is_gated = attention, is_gated
        self.up, self.down = linear(WIDTH, 24 * (1 + is_gated)), linear(24, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norms[0](x))
        y = self.up(self.norms[1](x))
        if self.is_gated:
            gate, opened = y.chunk(2, dim=-1)
            return x + self.down(F.silu(gate) * opened)
        return x + self.down(F.gelu(y))


class Model(nn.Module):
    """A small GPT with three blocks."""

    def __init__(
        self, attention: Callable[[], nn.Module], linear: type[nn.Module], is_gated: bool = False
    ) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block(attention(), linear, is_gated) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.words(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), targets.flatten())


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    made = torch.randint(VOCABULARY, (2, 4, LENGTH), generator=generator)
    return made[0], made[1]


def models() -> dict[str, Callable[[], Model]]:
    """Functions that make the models, by name."""
    made: dict[str, Callable[[], Model]] = {
        "of torch": lambda: Model(OfTorch, nn.Linear),
        "gated": lambda: Model(lambda: Packed("split", flash, nn.Linear), nn.Linear, is_gated=True),
    }
    for form, (how, linear) in zip(FORMS, cycle([(written_out, Conv1D), (flash, nn.Linear)])):
        made[f"{form} {linear.__name__}"] = lambda form=form, how=how, linear=linear: Model(
            lambda: Packed(form, how, linear), linear
        )
    return made
