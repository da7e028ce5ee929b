"""Products whose features are several pieces: one product, with a dim of its own for the pieces."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor


def linear_of_pieces(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``F.linear`` by a weight ``[pieces, features, k]``, as ``[..., pieces, features]``.

    Args:
        x: ``[..., k]``.
        weight: contiguous; a part of it may have fewer features of each piece.
        bias: ``[pieces, features]``.
    """
    made = F.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten())
    return made.reshape(*made.shape[:-1], *weight.shape[:2])


def matmul_of_pieces(x: Tensor, weight: Tensor) -> Tensor:
    """``x @ weight`` by a weight ``[..., k, pieces, features]``; keeps the last two dims."""
    made = x @ weight.flatten(-2)
    return made.reshape(*made.shape[:-1], *weight.shape[-2:])
