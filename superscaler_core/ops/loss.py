"""Losses of labels, and their mean over all labels that count, whose parts add up."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor


def cross_entropy(
    scores: Tensor,
    labels: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """Cross entropy of each label; 0 for those that are ignored.

    Args:
        scores: ``[n, classes, ...]``, or ``[classes]``.
        labels: ``[n, ...]`` of class numbers.
        weight: weight of each class, ``[classes]``.
        ignore_index: label that is not counted.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.
    """
    rows, wanted = _as_rows(scores, labels)
    losses = F.cross_entropy(
        rows, wanted, weight, ignore_index=ignore_index, reduction="none",
        label_smoothing=label_smoothing,
    )  # fmt: skip
    return losses.view(labels.shape)


def nll_loss(
    scores: Tensor, labels: Tensor, weight: Tensor | None = None, *, ignore_index: int = -100
) -> Tensor:
    """As ``cross_entropy``, of log probabilities."""
    rows, wanted = _as_rows(scores, labels)
    losses = F.nll_loss(rows, wanted, weight, ignore_index=ignore_index, reduction="none")
    return losses.view(labels.shape)


def count_labels(
    labels: Tensor, weight: Tensor | None = None, *, ignore_index: int, dtype: torch.dtype
) -> Tensor:
    """How many labels are not to be ignored, or the sum of the weights of their classes."""
    counts = labels != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    return weight[labels.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum(dtype=dtype)


def mean_of_labels(losses: Tensor, count: Tensor) -> Tensor:
    """The share of some losses in the mean: their sum divided by the number of counted labels.

    Args:
        losses: ``[...]`` of some labels.
        count: the result of ``count_labels`` for the whole microbatch.
    """
    # The sum is of the count's dtype, as many losses in half precision exceed its largest number.
    return (losses.sum(dtype=count.dtype) / count).to(losses.dtype)


def _as_rows(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and labels as ``[labels, classes]`` and ``[labels]``, where that copies no score.

    Kernels read classes that lie side by side several times as fast as classes that lie apart.
    """
    if scores.dim() < 3 or not scores.movedim(1, -1).is_contiguous():
        return scores, labels
    return scores.movedim(1, -1).flatten(0, -2), labels.flatten()
