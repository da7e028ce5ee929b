"""Callbacks: what is called after every step and every evaluation of a parallel model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from superscaler_core.parallel.stats import StepStats

if TYPE_CHECKING:
    from superscaler_core.parallel.reported import Reported


class Callback:
    """Called after every step and every evaluation of the models that it is added to.

    Override what you need. Every rank calls its own callbacks, after its part of the call, and an
    error in one is the caller's. The loss may still be on its way on a GPU: ``loss.item()`` waits
    for it.

    >>> class Prints(Callback):
    ...     def on_step_end(self, model, stats, loss):
    ...         print(stats)
    >>> # model.add_callback(Prints())
    """

    def on_step_end(self, model: Reported, stats: StepStats, loss: Tensor) -> None:
        """A step has left its gradients.

        Args:
            model: the model.
            stats: the stats of this step on this rank.
            loss: the loss of the whole batch.
        """

    def on_evaluate_end(self, model: Reported, stats: StepStats, loss: Tensor) -> None:
        """An evaluation has its results; arguments as of ``on_step_end``."""
