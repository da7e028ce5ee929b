"""mBART: an encoder and a decoder that share one embedding of a very large vocabulary.

The paper's study has 500,000 words, and its public code ends the decoder in a classifier of whole
sequences (``task="classification"``). So the only large tensor beside the blocks is the embedding,
which encoder and decoder read, and which is cheap to compute: the case for which the interlaced
pipeline is made. ``task="translation"`` scores every word with the embedding's own weight, as mBART
does when it is trained first; then the scores, not the embedding, dominate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import sqrt

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn

from superscaler_core.models import Model
from superscaler_core.models.gpt import MLP, initialize

TASKS = ("classification", "translation")


@dataclass(frozen=True)
class MBartConfig:
    """Sizes of an mBART.

    Attributes:
        vocabulary: number of tokens.
        sequence: length of a source, in tokens.
        target_sequence: length of a target, in tokens.
        layers: number of the encoder's blocks, and of the decoder's.
        width: width of the hidden state.
        heads: number of heads of the attention; divides the width.
        head_width: features of a head; ``width / heads`` if 0. The paper's public code has 64.
        dropout: probability, for the embeddings and all branches of a block.
        task: a name of ``TASKS``.
        classes: number of classes of a classification.
    """

    vocabulary: int = 500_000
    sequence: int = 1024
    target_sequence: int = 1024
    layers: int = 12
    width: int = 1024
    heads: int = 16
    head_width: int = 0
    dropout: float = 0.0
    task: str = "classification"
    classes: int = 3

    def __post_init__(self) -> None:
        if self.task not in TASKS:
            raise ValueError(f"mbart has no task {self.task!r}; it has {', '.join(TASKS)}.")

    @classmethod
    def presets(cls) -> dict[str, MBartConfig]:
        """``tiny`` for tests; the others are those of the paper's study, by its GPUs."""
        tiny = cls(40, sequence=8, target_sequence=6, layers=2, width=16, heads=4)
        return {
            "tiny": tiny,
            "tiny-translation": replace(tiny, task="translation"),
            "2-gpus": cls(layers=8, width=2048, heads=16, head_width=64),
            "4-gpus": cls(layers=16, width=3072, heads=24, head_width=64),
            "8-gpus": cls(layers=24, width=4096, heads=32, head_width=64),
            "16-gpus": cls(layers=36, width=5120, heads=32, head_width=64),
            "32-gpus": cls(layers=48, width=6144, heads=32, head_width=64),
        }


class Attention(nn.Module):
    """Attention of ``[batch, sequence, width]`` to a memory of any length, to the same shape."""

    def __init__(
        self, width: int, heads: int, head_width: int = 0, *, is_causal: bool = False
    ) -> None:
        super().__init__()
        self.heads, self.is_causal = heads, is_causal
        inner = heads * head_width or width
        self.q = nn.Linear(width, inner)
        self.k = nn.Linear(width, inner)
        self.v = nn.Linear(width, inner)
        self.out = nn.Linear(inner, width)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        q, k, v = (self._heads(t) for t in (self.q(x), self.k(memory), self.v(memory)))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal)
        joined: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return joined

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)


class EncoderLayer(nn.Module):
    """Attention, then MLP, each behind a norm and around a residual."""

    def __init__(self, config: MBartConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config.width, config.heads, config.head_width)
        self.norm2 = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width, 4 * config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attn(y, y))
        x = x + self.dropout(self.mlp(self.norm2(x)))
        return x


class DecoderLayer(nn.Module):
    """Causal attention, attention to the encoder, then MLP."""

    def __init__(self, config: MBartConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        sizes = config.width, config.heads, config.head_width
        self.attn = Attention(*sizes, is_causal=True)
        self.norm2 = nn.LayerNorm(config.width)
        self.cross = Attention(*sizes)
        self.norm3 = nn.LayerNorm(config.width)
        self.mlp = MLP(config.width, 4 * config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        y = self.norm1(x)
        x = x + self.dropout(self.attn(y, y))
        x = x + self.dropout(self.cross(self.norm2(x), memory))
        x = x + self.dropout(self.mlp(self.norm3(x)))
        return x


class Positions(nn.Module):
    """Turns looked-up words into the blocks' input: scaled, with positions, normed."""

    def __init__(self, config: MBartConfig, length: int) -> None:
        super().__init__()
        self.scale = sqrt(config.width)
        self.position = nn.Embedding(length, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, words: Tensor) -> Tensor:
        places = torch.arange(words.shape[1], device=words.device)
        x: Tensor = self.dropout(self.norm(words * self.scale + self.position(places)))
        return x


class MBart(nn.Module):
    """Encoder, decoder and loss; ``layers`` are the encoder's blocks, then the decoder's."""

    def __init__(self, config: MBartConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocabulary, config.width)
        self.source = Positions(config, config.sequence)
        self.target = Positions(config, config.target_sequence)
        self.layers = nn.ModuleList(
            [EncoderLayer(config) for _ in range(config.layers)]
            + [DecoderLayer(config) for _ in range(config.layers)]
        )
        self.encoder_norm = nn.LayerNorm(config.width)
        self.decoder_norm = nn.LayerNorm(config.width)
        if config.task == "classification":
            self.pool = nn.Linear(config.width, config.width)
            self.classify = nn.Linear(config.width, config.classes)
        else:
            self.head = nn.Linear(config.width, config.vocabulary, bias=False)
            self.head.weight = self.embed.weight
        self.apply(initialize)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        """Mean cross entropy, in float32 or wider.

        Args:
            source: tokens that the encoder reads, int64 ``[batch, sequence]``.
            target: tokens that the decoder reads, int64 ``[batch, target_sequence]``.
            labels: int64 ``[batch]`` of classes, or for translation shaped as ``target``, the
                token that follows each.
        """
        x = self.source(self.embed(source))
        for layer in self.layers[: self.config.layers]:
            x = layer(x)
        memory = self.encoder_norm(x)
        x = self.target(self.embed(target))
        for layer in self.layers[self.config.layers :]:
            x = layer(x, memory)
        scores = self._scores(self.decoder_norm(x))
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return F.cross_entropy(scores, labels)

    def _scores(self, x: Tensor) -> Tensor:
        """``[batch, classes]``, or ``[batch, vocabulary, target_sequence]``."""
        if self.config.task == "classification":
            # The last token, an end of sentence, has seen all of the target.
            scores: Tensor = self.classify(torch.tanh(self.pool(x[:, -1])))
        else:
            scores = self.head(x).transpose(1, 2)
        return scores


def example_inputs(
    config: MBartConfig, batch: int, generator: torch.Generator
) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens, and classes or tokens as labels."""
    is_class = config.task == "classification"
    source, target = (batch, config.sequence), (batch, config.target_sequence)
    drawn = (
        (config.vocabulary, source),
        (config.vocabulary, target),
        (config.classes, (batch,)) if is_class else (config.vocabulary, target),
    )
    first, second, third = (
        torch.randint(high, shape, generator=generator) for high, shape in drawn
    )
    return first, second, third


MODEL = Model(MBartConfig, MBart, example_inputs)
