"""Waiting: ops that compute nothing for a known time, which needs no core.

Ranks of an emulated cluster share this machine's cores. Real computation of one rank would slow
down the others, and no rank could overlap communication with computation. Where nearly all
computation is replaced by a wait, values, communication and everything else are still real.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor

from superscaler_core import register_op


class _Wait(torch.autograd.Function):
    """The identity with a wait; the backward waits twice as long."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, secs: float) -> Tensor:
        ctx.secs = secs
        time.sleep(secs)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.secs)
        return grads[0], None


@register_op("b s m -> b s m")
def tokens_waited(x: Tensor, *, nanos: float) -> Tensor:
    """The identity with a wait of ``nanos`` nanoseconds per element of ``[B, S, M]``."""
    found: Tensor = _Wait.apply(x, 1e-9 * nanos * x.numel())  # type: ignore[no-untyped-call]
    return found


@register_op("e g c h -> e g c h")
def experts_waited(x: Tensor, *, nanos: float) -> Tensor:
    """The same for values inside experts, ``[E, G, C, H]``."""
    found: Tensor = _Wait.apply(x, 1e-9 * nanos * x.numel())  # type: ignore[no-untyped-call]
    return found
