"""GradScaler: torch's gradient scaler, for parameters that are stored on several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class GradScaler(torch.amp.GradScaler):
    """Scales gradients; all ranks skip an update if a gradient of any of them overflows.

    Law (tests/superscaler_core/training/test_grad_scaler.py): weights and scales are those of
    ``torch.amp.GradScaler`` on a single device.

    Args:
        device: where gradients are.
        sum_of_all: sums a scalar over all ranks; collective.
        options: those of ``torch.amp.GradScaler``.
    """

    def __init__(
        self, device: torch.device, sum_of_all: Callable[[Tensor], Tensor], **options: Any
    ) -> None:
        super().__init__(device.type, **options)
        self._sum_of_all = sum_of_all
        if self.is_enabled():
            self._lazy_init_scale_growth_tracker(device)

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, *args: Any
    ) -> dict[torch.device, Tensor]:
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, *args)
        # A rank whose parameters have no gradient takes part too.
        here = sum((flag.cpu() for flag in found.values()), torch.zeros(()))
        total = self._sum_of_all(here).clamp(max=1.0)
        return {found_inf.device: total.to(found_inf.device)}
