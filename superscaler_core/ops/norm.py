"""Batch norm of a part of a batch, by the statistics of the part."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor


def batch_norm(
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    momentum: float,
    eps: float,
    is_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalize a part of a batch by itself.

    Args:
        x: ``[n here, channels, ...]``.
        mean, variance: running statistics ``[channels]``; not modified.
        weight, bias, momentum, eps: as in ``torch.nn.functional.batch_norm``.
        is_first: whether this is the first part, whose running statistics count.

    Returns:
        The normalized part, and the running statistics after it; zero if it is not the first.
    """
    mean, variance = mean.clone(), variance.clone()
    made = F.batch_norm(x, mean, variance, weight, bias, True, momentum, eps)
    if is_first:
        return made, mean, variance
    return made, torch.zeros_like(mean), torch.zeros_like(variance)
