"""Without data: stands for a function whose shapes are known where its values cannot be computed.

Memory is measured on the meta device, where a function that looks at values cannot run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def without_data(
    tensors: Sequence[Tensor],
    results: Sequence[tuple[Sequence[int], torch.dtype]],
    kept_bytes: int = 0,
) -> tuple[Tensor, ...]:
    """Results of these shapes and dtypes on the meta device.

    Autograd keeps the tensors, and further memory of ``kept_bytes`` bytes, until the backward.
    """
    apply: Any = _WithoutData.apply
    found: tuple[Tensor, ...] = apply(list(results), kept_bytes, *tensors)
    return found


class _WithoutData(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, results: Sequence[Any], kept_bytes: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        kept = torch.empty(kept_bytes, dtype=torch.uint8, device="meta")
        ctx.save_for_backward(*tensors, kept)
        made = tuple(torch.empty(tuple(s), dtype=d, device="meta") for s, d in results)
        ctx.mark_non_differentiable(*(x for x in made if not x.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        *tensors, _ = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        return (
            None,
            None,
            *(
                torch.empty_like(x) if is_needed else None
                for x, is_needed in zip(tensors, needed, strict=True)
            ),
        )
