"""Two passes: a parallel model whose loss is one of the features of the whole batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.ops import mix
from superscaler_core.parallel.batch import Batch, Inputs
from superscaler_core.parallel.parallel import Evaluated, Parallel
from superscaler_core.parallel.programs import FORWARD, Programs
from superscaler_core.parallel.whole_loss import GRADS, WholeLoss
from superscaler_core.run.rank import Rank
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
        self._whole_loss, said = whole_loss, programs.batch
        self._own = replace(said, dims=dict(said.dims.items() - whole_loss.grad_dims.items()))
        super().__init__(programs, call, transport, **options)

    @property
    def _said(self) -> Batch:
        return self._own

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        """Run both passes of one batch; every rank passes the whole batch."""
        features, rank = self._features("the features of a step", args, kwargs, FORWARD)
        with _drawing_as_all(rank):
            loss, grads = self._whole_loss.grads_of(features)
        super()._step(args, {**kwargs, GRADS: grads})
        return loss

    def _evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | Evaluated:
        """The loss of one batch in ``eval()`` mode, without gradients."""
        features, rank = self._features("evaluate", args, kwargs, None)
        with torch.no_grad(), _drawing_as_all(rank):
            return self._whole_loss.loss_of(features)

    def _features(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mode: frozenset[str] | None,
    ) -> tuple[list[Tensor], Rank]:
        """The features of the whole batch, without gradients; buffers stay as they are."""
        model = self._programs.model
        own = Inputs.of(self._own, model, ModelCall.of(model, args, {**kwargs, GRADS: ()}))
        zeros = self._whole_loss.zeros(next(iter(own.sizes.values()), 1))
        compiled, rank, batch = self._chosen(name, args, {**kwargs, GRADS: zeros}, mode)
        before = {key: value.clone() for key, value in rank.changing.items()}
        rank.step(batch)
        rank.take_buffers(before)
        found = self._batches.results(compiled, rank.results)
        return [found[feature] for feature in self._whole_loss.names], rank


@contextmanager
def _drawing_as_all(rank: Rank) -> Iterator[None]:
    """Random numbers of the loss are the same on all ranks, and others in every step."""
    with torch.random.fork_rng([rank.device] if rank.device.type == "cuda" else []):
        torch.manual_seed(mix(*rank.draws))
        yield
