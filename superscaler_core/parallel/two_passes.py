"""Two passes: a parallel model whose loss is one of the features of the whole batch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.parallel import Evaluated, Parallel
from superscaler_core.parallel.programs import FORWARD, Programs
from superscaler_core.parallel.whole_loss import GRADS, WholeLoss
from superscaler_core.run.transport import Transport


class TwoPasses(Parallel):
    """One rank's share of a model with a ``whole_loss``; ``parallelize`` makes it.

    Laws (tests/superscaler_core/parallel/test_whole_loss.py): losses and gradients are those of the
    whole batch on one device under every plan; both passes compute the same features, also with
    dropout; buffers change once a step.

    Args:
        programs: the programs of the model ``with_grads``.
        call: the call with the example, which has gradients of the features.
        transport, options: as in ``Parallel``.
        whole_loss: the loss.
    """

    def __init__(
        self,
        programs: Programs,
        call: ModelCall,
        transport: Transport,
        *,
        whole_loss: WholeLoss,
        **options: Any,
    ) -> None:
        self._whole_loss = whole_loss
        self._num_samples = next(iter(programs.inputs(call).sizes.values()), 1)
        super().__init__(programs, call, transport, **options)

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run both passes of one batch, as ``Parallel.step``; every rank passes the whole batch."""
        features = self._features("the features of a step", args, kwargs, FORWARD)
        loss, grads = self._whole_loss.grads_of(features)
        super().step(*args, **kwargs, **{GRADS: grads})
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Tensor | Evaluated:
        """The loss of one batch in ``eval()`` mode, without gradients."""
        features = self._features("evaluate", args, kwargs, None)
        with torch.no_grad():
            return self._whole_loss.loss_of(features)

    def _features(
        self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], mode: frozenset[str] | None
    ) -> list[Tensor]:
        """The features of the whole batch, without gradients; buffers stay as they are."""
        leaves = pytree.tree_leaves((args, kwargs))
        size = next((len(x) for x in leaves if isinstance(x, Tensor) and x.dim()), 1)
        zeros = self._whole_loss.zeros(self._num_samples, size)
        compiled, rank, batch = self._chosen(name, args, {**kwargs, GRADS: zeros}, mode)
        before = {key: value.clone() for key, value in rank.changing.items()}
        rank.step(batch)
        rank.take_buffers(before)
        found = self._batches.results(compiled, rank.results)
        return [found[feature] for feature in self._whole_loss.names]
