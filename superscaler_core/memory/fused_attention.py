"""Fused attention: makes the meta device use it as real devices do, without storing scores."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor
from torch.overrides import TorchFunctionMode


class FusedAttention(TorchFunctionMode):
    """Replaces attention by the fused kernel of real devices, which torch does not use on meta."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    is_fused = q.dim() == 4 and q.shape[-1] == v.shape[-1] and q.shape[1] == k.shape[1]
    if not is_fused or (mask is not None and mask.requires_grad):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, 0.0)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = fused(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
    return result
