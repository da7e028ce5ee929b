"""Embedding look-up in a part of the rows of its table."""

from __future__ import annotations

import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor


def embedding(
    ids: Tensor, rows: Tensor, *, first: int, num_rows: int, padding_idx: int = -1
) -> Tensor:
    """Rows of a table by number, zero where the number is not here: so parts add up.

    Args:
        ids: of integers.
        rows: ``[rows here, width]``, from row ``first`` on of a table of ``num_rows``.
        first, num_rows: see there.
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
