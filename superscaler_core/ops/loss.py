"""Losses of the labels here, times their share of all labels: so parts add up."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor


def cross_entropy(
    scores: Tensor, labels: Tensor, *, num_labels: int, label_smoothing: float = 0.0
) -> Tensor:
    """Share of the mean cross entropy that these labels make.

    Args:
        scores: ``[n, classes, ...]``, or ``[classes]``.
        labels: ``[n, ...]`` of class numbers, or probabilities shaped as the scores.
        num_labels: of the whole microbatch.
        label_smoothing: as in ``torch.nn.functional.cross_entropy``.

    Raises:
        ValueError: a label is -100, torch's default for "ignore": ``num_labels`` counts it. On a
            device where looking would wait for it, the result is NaN instead.
    """
    rows, wanted = _as_rows(scores, labels)
    mean = F.cross_entropy(rows, wanted, label_smoothing=label_smoothing)
    classes = scores.shape[1 if scores.dim() > 1 else 0]
    return _all_counted(mean, labels) * (scores.numel() // classes / num_labels)


def nll_loss(scores: Tensor, labels: Tensor, *, num_labels: int) -> Tensor:
    """Share of the mean negative log likelihood; as ``cross_entropy``, of log probabilities."""
    mean = F.nll_loss(*_as_rows(scores, labels))
    return _all_counted(mean, labels) * (labels.numel() / num_labels)


def count_labels(labels: Tensor, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """How many labels are not to be ignored, as a scalar of the loss's dtype."""
    return (labels != ignore_index).sum().to(dtype)


def _as_rows(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Scores and labels as ``[labels, classes]`` and ``[labels]``, where that copies no score.

    Kernels read classes that lie side by side several times as fast as classes that lie apart.
    """
    if scores.dim() < 3 or not scores.movedim(1, -1).is_contiguous():
        return scores, labels
    if labels.is_floating_point():
        return _rows(scores), _rows(labels)
    return _rows(scores), labels.flatten()


def _rows(x: Tensor) -> Tensor:
    return x.movedim(1, -1).flatten(0, -2)


def _all_counted(loss: Tensor, labels: Tensor) -> Tensor:
    if labels.is_floating_point():
        return loss
    ignored = (labels == -100).any()
    if labels.device.type != "cpu":
        return loss.masked_fill(ignored, float("nan"))
    if ignored:
        raise ValueError(
            "labels of -100 are ignored by default, but the mean was captured over all labels; "
            "call cross_entropy with another ignore_index, such as -1, and the labels are counted."
        )
    return loss
