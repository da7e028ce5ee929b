"""Parallel: a model that is trained and evaluated by all ranks together."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from superscaler_core.compiled import Compiled
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.batches import agreed_example, batches_of
from superscaler_core.parallel.programs import Programs
from superscaler_core.run.first_values import take_first_values
from superscaler_core.run.grad_scaler import GradScaler
from superscaler_core.run.load import module_from
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.rank import Rank
from superscaler_core.run.step_guard import StepGuard
from superscaler_core.run.trainer import IncompatibleKeys, Trainer
from superscaler_core.run.training_state import Saved
from superscaler_core.run.transport import Transport


class Evaluated(NamedTuple):
    """The loss of an evaluation, and the kept results beside it, each whole, by name."""

    loss: Tensor
    results: Mapping[str, Tensor]


class Parallel:
    """One rank's share of a model; ``parallelize`` makes it.

    A call stands for the same call of the model on a single device: every rank passes the *whole*
    batch and uses its part, and every rank gets the loss of the whole batch. So what a call does
    depends neither on the plan nor on the number of ranks. If ``Batch.kind`` is "local", ranks pass
    samples of their own, and the call is that of all their samples.

    All calls but ``parameters`` and ``named_parameters`` are collective.

    A batch of another shape than the example gets a program of its own when it first comes. Making
    it takes as long as making the first one; a bounded number of programs is kept. All programs
    share parameters, gradients and buffers.

    Args:
        programs: the programs of the model.
        call: the call with the example.
        transport: moves tensors between ranks.
        options: ``seed``, ``dtype`` and ``device`` of ``Rank``.
    """

    def __init__(
        self, programs: Programs, call: ModelCall, transport: Transport, **options: Any
    ) -> None:
        self._programs, self._transport, self._options = programs, transport, options
        compiled = programs.first(agreed_example(programs, call, transport))
        self._first = self._rank(compiled)
        weights, stored = compiled.plan.graph.weights, self._first.weights.stored
        take_first_values(weights, stored, self._first.tables, transport, self._first.device)
        self._ranks: dict[Compiled, Rank] = {compiled: self._first}
        self._last = self._first
        self._batches = batches_of(programs, compiled, transport, self._first.device)
        self.trainer = Trainer(self._first, transport)
        """The trainer of the example's shape, whose parameters all programs share."""

    @property
    def compiled(self) -> Compiled:
        """The program of the example's shape: its plan, reports and generated code."""
        return next(iter(self._ranks))

    # --- calls ----------------------------------------------------------------------------------

    def step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Run forward and backward of one batch; add to the gradients that optimizers read.

        Several steps before ``optimizer.step()`` accumulate gradients, as in torch.

        Args:
            args, kwargs: arguments of the model's forward: the same whole batch on every rank, or
                samples of the rank's own, as ``Batch.kind`` says.

        Returns:
            The loss of the whole batch, the same on all ranks.

        Raises:
            ValueError: on all ranks, if ranks pass other shapes or values where they have to be
                equal.
        """
        _, rank, batch = self._chosen(args, kwargs, trains=True)
        loss = rank.step(batch)
        self._first.draws = rank.draws
        return loss

    def evaluate(self, *args: Any, **kwargs: Any) -> Tensor | Evaluated:
        """Run the model's forward on one batch in ``eval()`` mode, without gradients.

        Args:
            args, kwargs: as in ``step``.

        Returns:
            The loss; with ``results`` of ``parallelize``, the loss and these, whole on all ranks.
        """
        compiled, rank, batch = self._chosen(args, kwargs, trains=False)
        loss = rank.step(batch)
        if not rank.results:
            return loss
        return Evaluated(loss, self._batches.results(compiled, rank.results))

    def step_guard(self) -> AbstractContextManager[StepGuard]:
        """A block that succeeds on all ranks or that all skip, as ``Trainer.step_guard``."""
        return self.trainer.guard_of([self._first, *self._ranks.values()])

    def recover(self) -> None:
        """Form the connections again after a step that failed, as ``Trainer.recover``."""
        self.trainer.recover_from(self._last)

    def _chosen(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool
    ) -> tuple[Compiled, Rank, dict[str, Tensor | OwnSamples]]:
        """The program for a call, this rank of it, ready for a step, and the inputs by name."""
        call = self._programs.call(args, kwargs)
        call = call if trains else call.map(Tensor.detach)
        # What is made here outlives this call, and a later one may compute without inference mode.
        with torch.inference_mode(False):
            whole = self._batches.whole(call)
            compiled = self._programs.of(whole, trains=trains)
            if compiled not in self._ranks:
                kept = self._programs.kept
                self._ranks = {c: rank for c, rank in self._ranks.items() if c in kept}
                self._ranks[compiled] = self._rank(compiled, shares=self._first)
        chosen = self._ranks[compiled]
        if chosen is not self._last:
            self._last.weights.rest()
            self._last.share_states()
            self._last = chosen
        chosen.draws, chosen.grad_scale = self._first.draws, self._first.grad_scale
        return compiled, chosen, self._batches.given(compiled, call)

    def _rank(self, compiled: Compiled, shares: Rank | None = None) -> Rank:
        rank = self._transport.rank
        # Copies, as a training changes buffers, and the model is the caller's.
        values = {name: value.clone() for name, value in compiled.values.items()}
        module = module_from(compiled.file(rank), rank)
        return Rank(module, self._transport, values, shares=shares, **self._options)

    # --- parameters -----------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The boxes of parameters that this rank stores, by their single-device names."""
        return self.trainer.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of ``named_parameters`` without names, as optimizers expect."""
        return self.trainer.parameters()

    def clip_grad_norm_(self, max_norm: float, *args: Any, **kwargs: Any) -> Tensor:
        """Clip the norm of all gradients of the model, as ``Trainer.clip_grad_norm_``."""
        return self.trainer.clip_grad_norm_(max_norm, *args, **kwargs)

    def grad_scaler(self, **options: Any) -> GradScaler:
        """A gradient scaler, by which all programs scale, as ``Trainer.grad_scaler``."""
        return self.trainer.grad_scaler(**options)

    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers, whole, on every rank, by their single-device names."""
        return self._with_states().state_dict()

    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> IncompatibleKeys:
        """Take this rank's boxes of whole parameters, as ``Trainer.load_state_dict``."""
        return self.trainer.load_state_dict(state, strict)

    def save(self, folder: str | Path, **state: Any) -> None:
        """Write a checkpoint that any plan and number of ranks can load, as ``Trainer.save``."""
        self._with_states().save(folder, **state)

    def load(self, folder: str | Path, **state: Any) -> Saved:
        """Read a checkpoint of any plan and number of ranks, as ``Trainer.load``."""
        return self._with_states().load(folder, **state)

    def _with_states(self) -> Trainer:
        """The trainer, after all ranks got the buffers that the last step changed; collective.

        The trainer itself knows only where the first program leaves these.
        """
        self._last.share_states()
        return self.trainer
