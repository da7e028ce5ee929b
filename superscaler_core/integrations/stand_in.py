"""StandIn: what the loop of ``transformers.Trainer`` uses in place of a wrapped model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from superscaler_core.parallel import Parallel


class StandIn:
    """A model whose call is an evaluation by all ranks.

    Steps do not call it (``PlanTrainer.training_step``).

    Args:
        model: the model that is parallelized.
        parallel: this rank's share of it.
        zero_grad: clears the gradients of the optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        parallel: Parallel,
        zero_grad: Callable[[], None],
    ) -> None:
        self._model, self._parallel = model, parallel
        self.zero_grad = zero_grad

    def __call__(self, **inputs: Any) -> dict[str, Any]:
        """The loss of a batch, and the results that the plan keeps, whole on all ranks."""
        found = self._parallel.evaluate(**inputs)
        if isinstance(found, Tensor):
            return {"loss": found}
        return {"loss": found.loss, **found.results}

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the model itself, for a log of their number."""
        return self._model.parameters()

    def train(self) -> None:
        """Put the model into ``train()`` mode, in which steps run it."""
        self._model.train()

    def eval(self) -> None:
        """Nothing: evaluations are in ``eval()`` mode by themselves."""
