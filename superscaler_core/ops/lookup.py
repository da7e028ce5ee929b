"""Embedding look-up in a part of the rows of its table."""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor


def embedding(
    ids: Tensor, rows: Tensor, *, first: int, num_rows: int, padding_idx: int = -1
) -> Tensor:
    """Rows of a table by number; zeros for rows that are not here, so that parts add up.

    Args:
        ids: row numbers, integers.
        rows: ``[rows here, width]``, from row ``first`` on of a table of ``num_rows``.
        first, num_rows: see ``rows``.
        padding_idx: row that gets no gradient; none if negative.

    Returns:
        ``[*ids.shape, width]``.
    """
    padding = padding_idx - first
    no_grad_row = padding if padding_idx >= 0 and 0 <= padding < len(rows) else None
    if len(rows) == num_rows:
        return F.embedding(ids, rows, no_grad_row)
    local = ids - first
    outside = (local < 0) | (local >= len(rows))
    found = F.embedding(local.masked_fill(outside, 0), rows, no_grad_row)
    return found.masked_fill(outside.unsqueeze(-1), 0)


def embedding_bag(
    ids: Tensor,
    rows: Tensor,
    weights: Tensor | None = None,
    *,
    first: int,
    is_mean: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """The sums of rows by bags, from a piece of the table; results of all pieces add up.

    Args:
        ids: row numbers in the whole table, ``[bags, rows of each]``.
        rows: the piece, ``[num_local, width]``.
        weights: weight of each row in its bag, ``[bags, rows of each]``; 1 if None.
        first: number of the piece's first row.
        is_mean: whether a sum is divided by the number of its rows.
        padding_idx: the row that is in no sum and gets no gradient.

    Returns:
        ``[bags, width]``.
    """
    counts = torch.ones_like(ids, dtype=rows.dtype) if padding_idx is None else ids != padding_idx
    scale = counts.to(rows.dtype) if weights is None else weights * counts
    if is_mean:
        scale = scale / counts.sum(1, keepdim=True).clamp(min=1)
    here = (ids >= first) & (ids < first + len(rows))
    return F.embedding_bag(
        torch.where(here, ids - first, 0), rows, mode="sum",
        per_sample_weights=torch.where(here, scale, torch.zeros_like(scale)),
    )  # fmt: skip
