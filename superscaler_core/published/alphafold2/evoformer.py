"""AlphaFold2's Evoformer: blocks over an alignment (MSA) and all pairs of residues, recycled.

Source: Jumper et al., Highly accurate protein structure prediction with AlphaFold, 2021,
supplement, algorithms 6 to 15. There dropout shares its mask along rows or columns; here every
element has its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from superscaler_core.models import Model

RECYCLED = {"prev_msa": 1, "prev_pair": 2}
"""Arguments of ``Evoformer.forward`` that are results of the pass before."""


@dataclass(frozen=True)
class EvoformerConfig:
    """Sizes of an Evoformer.

    Attributes:
        layers: number of blocks.
        sequences: rows of the alignment.
        residues: its columns; pairs are of residues.
        msa_width, pair_width: width of an element of the alignment, and of a pair.
        head_width: width of a head of attention; divides both widths.
        outer_width: width of the vectors whose outer products are summed over the sequences.
        triangle_width: width of the edges that triangular products multiply; the pair's if 0.
        bins: number of bins for the distances in the loss.
        dropout: probability in the branches of attention and triangles.
        outer_last: outer product at a block's end, so that alignment and pairs of a block are two
            branches that do not wait for each other; AlphaFold2 has it between them.
    """

    layers: int = 48
    sequences: int = 128
    residues: int = 256
    msa_width: int = 256
    pair_width: int = 128
    head_width: int = 32
    outer_width: int = 32
    triangle_width: int = 0
    bins: int = 64
    dropout: float = 0.0
    outer_last: bool = False

    @classmethod
    def presets(cls) -> dict[str, EvoformerConfig]:
        """``tiny`` for tests; the others are those of SuperScaler's study, sequences x residues."""
        return {
            "tiny": cls(
                layers=2, sequences=4, residues=5, msa_width=16, pair_width=8, head_width=4,
                outer_width=2, triangle_width=6, bins=5,
            ),
            "128x256": cls(sequences=128, residues=256),
            "512x256": cls(sequences=512, residues=256),
            "512x384": cls(sequences=512, residues=384),
        }  # fmt: skip


class GatedAttention(nn.Module):
    """Attention along dim 2 of ``[batch, rows, n, width]``, every head behind a gate."""

    def __init__(self, width: int, head_width: int) -> None:
        super().__init__()
        self.heads, self.scale = width // head_width, head_width**-0.5
        self.q = nn.Linear(width, width, bias=False)
        self.k = nn.Linear(width, width, bias=False)
        self.v = nn.Linear(width, width, bias=False)
        self.gate = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """The update of ``x``; ``bias`` of ``[batch, n, n, heads]`` is added to the scores."""
        q, k, v = (self._heads(line(x)) for line in (self.q, self.k, self.v))
        scores = (q * self.scale) @ k.transpose(-1, -2)
        if bias is not None:
            scores = scores + bias.permute(0, 3, 1, 2).unsqueeze(1)
        mixed = (scores.softmax(-1) @ v).transpose(2, 3).flatten(3)
        update: Tensor = self.out(torch.sigmoid(self.gate(x)) * mixed)
        return update

    def _heads(self, x: Tensor) -> Tensor:
        """``[batch, rows, heads, n, head_width]``."""
        return x.view(*x.shape[:3], self.heads, -1).transpose(2, 3)


class MSARow(nn.Module):
    """Every sequence attends along its residues, biased by the pairs (algorithm 7)."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_width)
        self.pair_norm = nn.LayerNorm(config.pair_width)
        heads = config.msa_width // config.head_width
        self.bias = nn.Linear(config.pair_width, heads, bias=False)
        self.attn = GatedAttention(config.msa_width, config.head_width)
        self.dropout = config.dropout

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        update = self.attn(self.norm(msa), self.bias(self.pair_norm(pair)))
        return msa + F.dropout(update, self.dropout, self.training)


class MSAColumn(nn.Module):
    """Every residue attends along the sequences (algorithm 8)."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_width)
        self.attn = GatedAttention(config.msa_width, config.head_width)

    def forward(self, msa: Tensor) -> Tensor:
        update: Tensor = self.attn(self.norm(msa).transpose(1, 2))
        return msa + update.transpose(1, 2)


class Transition(nn.Module):
    """Two linear maps with ReLU between them, four times as wide (algorithms 9 and 15)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        update: Tensor = self.down(torch.relu(self.up(self.norm(x))))
        return x + update


class OuterProductMean(nn.Module):
    """Outer products of two residues' vectors, averaged over the sequences (algorithm 10)."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.msa_width)
        self.left = nn.Linear(config.msa_width, config.outer_width)
        self.right = nn.Linear(config.msa_width, config.outer_width)
        self.out = nn.Linear(config.outer_width**2, config.pair_width)

    def forward(self, msa: Tensor, pair: Tensor) -> Tensor:
        x = self.norm(msa)
        left, right = self.left(x) / msa.shape[1], self.right(x)
        products = torch.einsum("bsic,bsjd->bijcd", left, right)
        update: Tensor = self.out(products.flatten(3))
        return pair + update


class TriangleProduct(nn.Module):
    """Update an edge by the two others of all triangles that it is in (algorithms 11 and 12)."""

    def __init__(self, config: EvoformerConfig, *, outgoing: bool) -> None:
        super().__init__()
        width, inner = config.pair_width, config.triangle_width or config.pair_width
        self.norm, self.inner_norm = nn.LayerNorm(width), nn.LayerNorm(inner)
        self.left, self.right = nn.Linear(width, inner), nn.Linear(width, inner)
        self.left_gate, self.right_gate = nn.Linear(width, inner), nn.Linear(width, inner)
        self.gate, self.out = nn.Linear(width, width), nn.Linear(inner, width)
        self.equation = "bikc,bjkc->bijc" if outgoing else "bkic,bkjc->bijc"
        self.dropout = config.dropout

    def forward(self, pair: Tensor) -> Tensor:
        z = self.norm(pair)
        left = torch.sigmoid(self.left_gate(z)) * self.left(z)
        right = torch.sigmoid(self.right_gate(z)) * self.right(z)
        mixed = self.inner_norm(torch.einsum(self.equation, left, right))
        update = torch.sigmoid(self.gate(z)) * self.out(mixed)
        return pair + F.dropout(update, self.dropout, self.training)


class TriangleAttention(nn.Module):
    """Edges attend to those that start, or end, at the same residue (algorithms 13 and 14).

    The third edge of each triangle biases the scores.
    """

    def __init__(self, config: EvoformerConfig, *, starting: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.pair_width)
        heads = config.pair_width // config.head_width
        self.bias = nn.Linear(config.pair_width, heads, bias=False)
        self.attn = GatedAttention(config.pair_width, config.head_width)
        self.starting, self.dropout = starting, config.dropout

    def forward(self, pair: Tensor) -> Tensor:
        z = self.norm(pair)
        # Edges that end at a residue are a row of the transposed pairs.
        z = z if self.starting else z.transpose(1, 2)
        update: Tensor = self.attn(z, self.bias(z))
        update = update if self.starting else update.transpose(1, 2)
        return pair + F.dropout(update, self.dropout, self.training)


class Block(nn.Module):
    """One layer (algorithm 6); every module adds its update to what it reads."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.msa_row = MSARow(config)
        self.msa_col = MSAColumn(config)
        self.msa_transition = Transition(config.msa_width)
        self.outer = OuterProductMean(config)
        self.tri_out = TriangleProduct(config, outgoing=True)
        self.tri_in = TriangleProduct(config, outgoing=False)
        self.tri_start = TriangleAttention(config, starting=True)
        self.tri_end = TriangleAttention(config, starting=False)
        self.pair_transition = Transition(config.pair_width)
        self.outer_last = config.outer_last

    def forward(self, msa: Tensor, pair: Tensor) -> tuple[Tensor, Tensor]:
        msa = self.msa_transition(self.msa_col(self.msa_row(msa, pair)))
        if not self.outer_last:
            pair = self.outer(msa, pair)
        pair = self.tri_in(self.tri_out(pair))
        pair = self.pair_transition(self.tri_end(self.tri_start(pair)))
        return msa, self.outer(msa, pair) if self.outer_last else pair


class Evoformer(nn.Module):
    """A stack of blocks behind recycling, with a loss on the distances of residues."""

    def __init__(self, config: EvoformerConfig) -> None:
        super().__init__()
        self.recycle_msa = nn.LayerNorm(config.msa_width)
        self.recycle_pair = nn.LayerNorm(config.pair_width)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = nn.Linear(config.pair_width, config.bins)

    def forward(
        self, msa: Tensor, pair: Tensor, target: Tensor, prev_msa: Tensor, prev_pair: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One pass of recycling.

        AlphaFold2 recycles the first row of the alignment; here it is all of it, so that every
        row is laid out alike.

        Args:
            msa: embedded alignment, ``[batch, sequences, residues, msa_width]``.
            pair: embedded pairs, ``[batch, residues, residues, pair_width]``.
            target: int64 ``[batch, residues, residues]``, the bin of every pair's distance.
            prev_msa, prev_pair: the results of the pass before; zeros in the first.

        Returns:
            The mean cross entropy of the bins in float32 or wider, and both results.
        """
        msa = msa + self.recycle_msa(prev_msa)
        pair = pair + self.recycle_pair(prev_pair)
        for layer in self.layers:
            msa, pair = layer(msa, pair)
        scores = self.head(pair)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return F.cross_entropy(scores.permute(0, 3, 1, 2), target), msa, pair


def example_inputs(
    config: EvoformerConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, ...]:
    """Random embeddings and distances, and zeros as the results of the pass before."""
    shapes = (
        (batch, config.sequences, config.residues, config.msa_width),
        (batch, config.residues, config.residues, config.pair_width),
    )
    msa, pair = (torch.randn(shape, generator=generator) for shape in shapes)
    target = torch.randint(config.bins, pair.shape[:3], generator=generator)
    return msa, pair, target, torch.zeros_like(msa), torch.zeros_like(pair)


MODEL = Model(EvoformerConfig, Evoformer, example_inputs, RECYCLED)
