"""Delay: what a step asks of corrections for gradients that are some updates late.

``published.asynchronous.PipeMare`` is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

import torch
from torch import Tensor


class CorrectedWeights(Protocol):
    """Corrects the copies of weights that a backward reads, for the time of the backward.

    Copies come with their names, and the numbers of their versions.
    """

    def corrected(self, copies: Iterable[tuple[str, Tensor, int]]) -> AbstractContextManager[None]:
        """Put other values into copies, and the real ones back at the end."""

    def note(self, copies: Iterable[tuple[str, Tensor, int]]) -> object:
        """Note the present values; called before a step's first update, and after every update."""

    def restart(self) -> None:
        """Begin a step, whose version 0 is the present weights."""


class DelayCorrection(Protocol):
    """Corrections of updates whose gradients are delayed; tau counts updates of delay."""

    @property
    def corrects_weights(self) -> bool:
        """Whether ``weights`` changes what backwards read."""

    def rate(self, tau: float, update: int) -> float:
        """The factor of the learning rate of an update."""

    def weights(self, delays: Mapping[str, float]) -> CorrectedWeights:
        """Corrects copies of weights by their names, given the delay of each."""


@contextmanager
def scaled_rates(optimizer: torch.optim.Optimizer, factor: float) -> Iterator[None]:
    """Multiply the learning rates of an optimizer for one step."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate * factor
    try:
        yield
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
