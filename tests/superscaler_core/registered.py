"""Registered functions for tests, at the top level of an importable module."""

import torch
from torch import Tensor

from superscaler_core import register_op


@register_op("b s^ -> b k^", sizes={"k": "count"}, dtypes=["int64"])
def best(scores: Tensor, *, count: int) -> Tensor:
    """The positions of the ``count`` best scores.

    Tracing cannot follow this function, because its code depends on the values of the scores.
    """
    return torch.stack(
        [row[row.argsort(descending=True).tolist()[:count]] for row in scores]
    ).long()


@register_op("b (g e^), e^ f -> b (g f)", sizes={"g": "groups"}, flops=2.0)
def grouped(x: Tensor, weight: Tensor, *, groups: int, scale: float = 0.5) -> Tensor:
    """A product for each group of columns.

    The code infers the number of groups from ``x``, so that it also computes parts of the op.
    """
    pieces = x.unflatten(1, (-1, len(weight))) @ weight
    return pieces.flatten(1) * scale if groups else x


@register_op("b^ h+, h -> b, h")
def halves(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """An op with two results."""
    return (x * y).sum(1), y * y if x.sum() is not None else y


@register_op("b^ s^ -> n^ s^", sizes={"n": 4})
def positive(x: Tensor) -> Tensor:
    """The first four rows whose sum is positive, padded with zero rows."""
    rows = x[(x.sum(1) > 0).nonzero()[:4, 0]]
    return torch.cat([rows, rows.new_zeros(4 - len(rows), x.shape[1])])
