"""Attention of some of the queries to all keys."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor

from superscaler_core.ops.random import dropout


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    first: int = 0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    p: float = 0.0,
    seed: int = 0,
    lo: Sequence[int] = (),
    shape: Sequence[int] = (),
) -> Tensor:
    """Scaled dot-product attention of the queries from row ``first`` on.

    Args:
        q: ``[..., queries here, width]``.
        k, v: ``[..., keys, width]``.
        mask: added to the scores, or true where a key may be seen.
        first: number of the first query here; with ``is_causal`` a query sees no later key.
        is_causal, scale, enable_gqa: as in ``scaled_dot_product_attention``.
        p: dropout probability of the weights, by their places in the whole ``shape``.
        seed, lo, shape: as in ``dropout``, of the weights ``[..., queries, keys]``.
    """
    # As in torch, a query gets zeros if its mask hides every key. A causal mask never hides all.
    softmax = torch.softmax if mask is None else torch._safe_softmax
    if is_causal:
        # Later keys would only be masked away.
        last = min(first + q.shape[-2], k.shape[-2])
        if last < k.shape[-2]:
            k, v = k[..., :last, :], v[..., :last, :]
        if first > 0 or p > 0:
            ones = torch.ones(q.shape[-2], last, dtype=torch.bool, device=q.device)
            mask, is_causal = ones.tril(first), False
    if p == 0:
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if enable_gqa:
        k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.transpose(-1, -2) * (1 / sqrt(q.shape[-1]) if scale is None else scale)
    if mask is not None:
        hidden = float("-inf")
        scores = scores.masked_fill(~mask, hidden) if mask.dtype == torch.bool else scores + mask
    weights = softmax(scores, -1)
    # Every batch of the result draws zeros of its own, even if only the values have these batches.
    shapes = weights.shape[:-2], v.shape[:-2]
    lead = torch.broadcast_shapes(*shapes)  # type: ignore[no-untyped-call]
    weights = weights.expand(*lead, *weights.shape[-2:])
    return dropout(weights, p, seed, lo=lo, shape=shape) @ v
