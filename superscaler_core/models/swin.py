"""Swin Transformer: attention inside windows of an image, which every second block shifts.

The matrix of attention is explicit, as in the paper's time, because co-shard is about its memory; a
fused kernel would not keep it. There is no stochastic depth.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from superscaler_core.models.gpt import MLP
from superscaler_core.rules.register import register_op


@dataclass(frozen=True)
class SwinConfig:
    """Sizes of a Swin Transformer.

    Attributes:
        image: height and width of an image, in pixels.
        patch: height and width of a patch, which becomes one token.
        window: height and width of a window, in tokens; all of the image where that is smaller.
        width: width of a token in the first group of blocks; width and heads double between groups.
        heads: number of heads of the attention in the first group.
        depths: blocks of every group; between groups height and width are halved.
        classes: number of classes.
    """

    image: int = 1536
    patch: int = 4
    window: int = 48
    width: int = 256
    heads: int = 8
    depths: tuple[int, ...] = (2, 2, 18, 2)
    classes: int = 1000

    @classmethod
    def presets(cls) -> dict[str, SwinConfig]:
        """``tiny`` for tests; the others are those of the paper's code and its successor's.

        The successor's sizes for 4, 8, 16 and 32 devices are 2.1B, 5.4B, 11.6B and 29B. The size
        that the paper's code calls 6.6B has 5.9B parameters.
        """
        made = {
            "tiny": cls(image=16, patch=2, window=4, width=16, heads=4, depths=(2, 1), classes=8)
        }
        for name, width, layers, heads in _PUBLISHED:
            made[name] = cls(width=width, heads=heads, depths=(2, 2, layers, 2))
        return made


# Heads are 32 wide, except in the largest: 48, so that 32 heads can be cut over 32 devices.
_PUBLISHED = (
    ("201M", 192, 18, 6), ("355M", 256, 18, 8),
    ("1.8B", 512, 26, 16), ("2.1B", 512, 32, 16), ("2.5B", 512, 42, 16),
    ("5.4B", 768, 40, 24), ("5.9B", 768, 42, 24),
    ("11.6B", 1024, 48, 32),
    ("29B", 1536, 56, 32), ("30B", 1536, 58, 32),
)  # fmt: skip
"""Name, by the number of parameters; width; blocks of the third group; heads."""


@register_op("b n h l t, n l, n t -> b n h l t", saves=())
def hide(scores: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """Hide the tokens of a shifted window that come from the other side of the image.

    Args:
        scores: scores of the attention, ``[batch, windows, heads, queries, keys]``.
        rows: the region that every query is from, ``[windows, queries]``.
        columns: the region that every key is from, ``[windows, keys]``.

    Returns:
        The scores, ``-inf`` where both regions differ.
    """
    # Added, so that autograd keeps nothing as large as the scores.
    mask = torch.zeros((), dtype=scores.dtype, device=scores.device).masked_fill(
        rows[:, :, None] != columns[:, None, :], float("-inf")
    )
    return scores + mask[:, None]


class WindowAttention(nn.Module):
    """Attention of the tokens of each window, ``[batch, windows, tokens, width]`` to the same.

    The scores have a bias for each head and each offset between two tokens.
    """

    def __init__(self, width: int, heads: int, window: int) -> None:
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width)
        self.k = nn.Linear(width, width)
        self.v = nn.Linear(width, width)
        self.out = nn.Linear(width, width)
        self.offset = nn.Parameter(torch.empty(heads, (2 * window - 1) ** 2))

    def forward(self, x: Tensor, offsets: Tensor, regions: Tensor | None) -> Tensor:
        q, k, v = (self._heads(line(x)) for line in (self.q, self.k, self.v))
        scores = q * q.shape[-1] ** -0.5 @ k.transpose(-1, -2) + self.offset[:, offsets]
        if regions is not None:
            scores = hide(scores, regions, regions)
        mixed = scores.softmax(-1) @ v
        joined: Tensor = self.out(mixed.transpose(2, 3).flatten(3))
        return joined

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:3], self.heads, -1).transpose(2, 3)


class Merge(nn.Module):
    """Four neighbours become one token of twice the width."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4 * width)
        self.line = nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        merged: Tensor = self.line(self.norm(squares(x, 2)))
        return merged


class Block(nn.Module):
    """One layer, ``[batch, height, width of the image, width]`` to the same.

    Args:
        width: width of its tokens.
        heads: number of heads of its attention.
        size: height and width of the image, in tokens.
        window: height and width of a window.
        shift: how far windows are shifted, in tokens; 0 for no shift.
        merges: whether it begins with a merge, of tokens of half the width.
    """

    def __init__(
        self, width: int, heads: int, size: int, window: int, shift: int, merges: bool
    ) -> None:
        super().__init__()
        self.size, self.window, self.shift = size, window, shift
        self.merge = Merge(width // 2) if merges else nn.Identity()
        self.norm1 = nn.LayerNorm(width)
        self.attn = WindowAttention(width, heads, window)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = MLP(width, 4 * width)

    def forward(self, x: Tensor, offsets: Tensor, regions: Tensor | None) -> Tensor:
        x = self.merge(x)
        windows = to_windows(self._shifted(self.norm1(x), -1), self.window)
        mixed = from_windows(self.attn(windows, offsets, regions), self.size, self.window)
        x = x + self._shifted(mixed, 1)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y

    def _shifted(self, x: Tensor, sign: int) -> Tensor:
        shift = sign * self.shift
        return x.roll((shift, shift), (1, 2)) if shift else x


class Swin(nn.Module):
    """Image classifier with a cross-entropy loss."""

    def __init__(self, config: SwinConfig) -> None:
        super().__init__()
        self.config = config
        self.patches = nn.Linear(3 * config.patch**2, config.width)
        self.norm0 = nn.LayerNorm(config.width)
        self.layers = nn.ModuleList(_blocks(config))
        width = config.width * 2 ** (len(config.depths) - 1)
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, config.classes)
        self.apply(initialize)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy, in float32 or wider.

        Args:
            images: ``[batch, 3, image, image]``.
            labels: int64 ``[batch]``.
        """
        x = self.norm0(self.patches(squares(images.permute(0, 2, 3, 1), self.config.patch)))
        # Blocks share them, so that a graph has each once.
        offsets: dict[int, Tensor] = {}
        regions: dict[int, Tensor] = {}
        for layer in self.layers:
            assert isinstance(layer, Block)
            if layer.window not in offsets:
                offsets[layer.window] = offsets_of(layer.window, images.device)
            if layer.shift and layer.size not in regions:
                regions[layer.size] = regions_of(layer, images.device)
            region = regions[layer.size] if layer.shift else None
            x = layer(x, offsets[layer.window], region)
        scores = self.head(self.norm(x).mean((1, 2)))
        return F.cross_entropy(scores.to(torch.promote_types(scores.dtype, torch.float32)), labels)


def _blocks(config: SwinConfig) -> list[Block]:
    made = []
    for group, depth in enumerate(config.depths):
        size, width = config.image // config.patch // 2**group, config.width * 2**group
        window = min(config.window, size)
        for i in range(depth):
            shift = window // 2 if i % 2 and window < size else 0
            heads = config.heads * 2**group
            made.append(Block(width, heads, size, window, shift, merges=group > 0 and i == 0))
    return made


def to_windows(x: Tensor, window: int) -> Tensor:
    """``[batch, height, width, c]`` to ``[batch, windows, window * window, c]``."""
    batch, size, _, width = x.shape
    count = size // window
    cut = x.view(batch, count, window, count, window, width).permute(0, 1, 3, 2, 4, 5)
    return cut.reshape(batch, count * count, window * window, width)


def from_windows(x: Tensor, size: int, window: int) -> Tensor:
    """Undo ``to_windows`` of an image of ``size`` tokens a side."""
    batch, _, _, width = x.shape
    count = size // window
    cut = x.view(batch, count, count, window, window, width).permute(0, 1, 3, 2, 4, 5)
    return cut.reshape(batch, size, size, width)


def squares(x: Tensor, side: int) -> Tensor:
    """``[batch, height, width, c]`` to ``[..., height / side, width / side, side * side * c]``."""
    batch, height, width, depth = x.shape
    cut = x.reshape(batch, height // side, side, width // side, side, depth)
    return cut.permute(0, 1, 3, 2, 4, 5).flatten(3)


def offsets_of(window: int, device: torch.device) -> Tensor:
    """For every pair of tokens of a window the number of its offset, ``[tokens, tokens]``."""
    places = torch.arange(window, device=device)
    apart = places[:, None] - places[None, :] + window - 1
    down, right = apart[:, None, :, None], apart[None, :, None, :]
    return (down * (2 * window - 1) + right).reshape(window**2, window**2)


def regions_of(block: Block, device: torch.device) -> Tensor:
    """For every token of every shifted window, the number of the region that it is from.

    Tokens that the shift brought from the other side have other numbers than their neighbours.
    """
    places = torch.arange(block.size, device=device)
    side = (places >= block.size - block.shift).to(torch.int64)
    regions = 2 * side[:, None] + side[None, :]
    return to_windows(regions[None, :, :, None], block.window)[0, :, :, 0]


def initialize(module: nn.Module) -> None:
    """Swin's start: weights and biases of offsets of standard deviation 0.02, others of zero."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, WindowAttention):
        nn.init.trunc_normal_(module.offset, std=0.02)


def example_inputs(
    config: SwinConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Normally distributed pixels and random labels."""
    images = torch.randn(batch, 3, config.image, config.image, generator=generator)
    return images, torch.randint(config.classes, (batch,), generator=generator)
