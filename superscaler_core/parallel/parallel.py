"""Parallel: a model that is trained and evaluated by all ranks together."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from superscaler_core.compiled import Compiled
from superscaler_core.errors import PlanError
from superscaler_core.front_end.model_call import ModelCall
from superscaler_core.parallel.batch import Batch as BatchForm
from superscaler_core.parallel.batches import agreed_example, batches_of
from superscaler_core.parallel.forward import Forward, Side
from superscaler_core.parallel.generate import Generator, by_name, is_random, random_state
from superscaler_core.parallel.habits import Results
from superscaler_core.parallel.learned_inputs import learned
from superscaler_core.parallel.meter import Facts, Meter
from superscaler_core.parallel.own_batches import OwnBatches
from superscaler_core.parallel.programs import MadeProgram, Programs, fingerprint_of
from superscaler_core.parallel.with_weights import WithWeights
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.rank import Rank
from superscaler_core.run.transport import Transport
from superscaler_core.training.checksum import checksum
from superscaler_core.training.first_values import share_buffers
from superscaler_core.training.same_call import CallRequest, SameCall
from superscaler_core.training.step_guard import StepGuard
from superscaler_core.training.trainer import Trainer, check_no_gradients, said_of

Batch = dict[str, Tensor | OwnSamples]
"""The inputs of a program by name."""

_FREEZES, _COMPARES = 1, 2
"""What a rank may ask all for: to agree on what is trained, and to compare batches."""


class Evaluated(NamedTuple):
    """The loss of an evaluation, and the kept results beside it, each whole, by name."""

    loss: Tensor
    results: Mapping[str, Tensor]


class Parallel(WithWeights):
    """One rank's share of a model; ``parallelize`` makes it.

    A call stands for the same call of the model on a single device: every rank passes the *whole*
    batch and uses its part, and every rank gets the loss of the whole batch. So what a call does
    depends neither on the plan nor on the number of ranks. If ``Batch.kind`` is "local", ranks pass
    samples of their own, and the call is that of all their samples.

    All calls but ``parameters``, ``named_parameters``, ``stats`` and those of callbacks are
    collective.

    A batch of another shape than the example gets a program of its own when it first comes. Making
    it takes as long as making the first one; a bounded number of programs is kept. All programs
    share parameters, gradients and buffers.

    Args:
        programs: the programs of the model.
        call: the call with the example.
        transport: moves tensors between ranks.
        weights: the folder of the parameters' first values; those of the model if None.
        options: ``seed``, ``dtype`` and ``device`` of ``Rank``.
    """

    def __init__(
        self,
        programs: Programs,
        call: ModelCall,
        transport: Transport,
        *,
        weights: str | Path | None = None,
        **options: Any,
    ) -> None:
        self._programs, self._transport, self._options = programs, transport, options
        calls = SameCall(tuple(range(programs.num_devices)), transport)
        example = agreed_example(programs, call, calls)
        with calls.prepared("parallelize", seed=str(options.get("seed", 0))) as request:
            compiled = programs.first(example)
            request.equal |= fingerprint_of(compiled)
        self._share_averages(compiled)
        self._first = self._rank(compiled)
        self._ranks: dict[Compiled, Rank] = {compiled: self._first}
        if weights is None:
            self._take_first_values()
        self._last = self._first
        batches = partial(
            batches_of, compiled=compiled, transport=transport, device=self._first.device
        )
        self._batches = batches(programs)
        self._forward = Forward(programs, self._said, batches)
        self._generator: Generator | None = None
        self.meter, self.facts = Meter(transport), Facts(compiled, self._first)
        self._facts = {compiled: self.facts}
        self.trainer = Trainer(self._first, transport, programs.parameters)
        """The trainer of the example's shape, whose parameters all programs share."""
        self.results: Mapping[str, Tensor] = Results()
        """The results of the last step that ``step_results`` of ``parallelize`` names, whole."""
        # The trainer itself knows only where the first program leaves the buffers.
        self.trainer.share_states = lambda: self._last.share_states()
        self.trainer.calls.users.trail = lambda: self._last.trail
        if weights is not None:
            self._read_weights(weights)

    @property
    def compiled(self) -> Compiled:
        """The program of the example's shape: its plan, reports and generated code."""
        return next(iter(self._ranks))

    @property
    def _said(self) -> BatchForm:
        """What a batch of a call is."""
        return self._programs.batch

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
        return self._reported("step", self._step, args, kwargs, lambda loss: loss)

    def _step(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor:
        compiled, rank, batch = self._chosen("step", args, kwargs)
        device = torch.device(self._options.get("device", "cpu"))
        with learned(compiled, self._transport, batch, device) as given:
            loss = rank.step(given)
        self._first.draws = rank.draws
        self.results = Results(self._batches.results(compiled, rank.results))
        return loss

    def scaled(self, factor: float) -> AbstractContextManager[None]:
        """Inside, steps leave ``factor`` times their gradients, as ``Trainer.scaled``."""
        return self.trainer.scaled(factor)

    def loader(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        drop_last: bool = False,
        **options: Any,
    ) -> DataLoader[Any]:
        """A ``DataLoader`` of what this rank passes to ``step``.

        With ``Batch(kind="local")`` these are its share of every batch, and otherwise all of it. No
        sample is repeated; ``loader.batch_sampler.set_epoch(n)`` shuffles in the order of an epoch.

        Args:
            dataset: with ``len``, the same on all ranks.
            batch_size: samples of the whole batch, over all ranks.
            shuffle, seed, drop_last: as in ``OwnBatches``.
            options: further arguments of ``DataLoader``, such as ``num_workers``.
        """
        size = len(dataset)  # type: ignore[arg-type]
        own = OwnBatches(size, batch_size, *self._batches.share, shuffle, seed, drop_last)
        return DataLoader(dataset, batch_sampler=own, **options)

    def evaluate(self, *args: Any, **kwargs: Any) -> Tensor | Evaluated:
        """Run the model's forward on one batch in ``eval()`` mode, without gradients.

        Args:
            args, kwargs: as in ``step``.

        Returns:
            The loss; with ``results`` of ``parallelize``, the loss and these, whole on all ranks.
        """
        return self._reported("evaluate", self._evaluate, args, kwargs, _loss_of)

    def _evaluate(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | Evaluated:
        compiled, rank, batch = self._chosen("evaluate", args, kwargs)
        loss = rank.step(batch)
        if not rank.results:
            return loss
        return Evaluated(loss, self._batches.results(compiled, rank.results))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for a batch in ``eval()`` mode, without gradients and loss.

        Args:
            args, kwargs: as in ``step``, but for what only the loss needs, such as labels.

        Returns:
            What the model returns, with every tensor whole, on every rank; with
            ``Batch(kind="local")``, with the rank's own samples.

        Raises:
            PlanError: the model returns no tensor, or something of microbatches that is none of the
                whole batch.
        """
        call = self._forward.call(args, kwargs)
        side = self._forward.side(call)
        with self.trainer.calls.users.inside("forward", args, kwargs):
            compiled, rank, batch = self._chosen("forward", args, kwargs, side=side)
            rank.step(batch)
        return self._forward.returned(call, side.batches.own(compiled, rank.results))

    forward = __call__

    def shards(self, *args: Any, **kwargs: Any) -> Any:
        """As a call, with what this rank computes of each tensor in place of the whole.

        Args:
            args, kwargs: as in a call; every rank passes the whole batch.

        Returns:
            What the model returns, with an ``OutputShard`` for each tensor, or None where this rank
            has nothing of it, as the first stages of a pipeline.

        Raises:
            PlanError: ranks pass samples of their own, whose outputs a call returns.
        """
        if self._batches.is_local:
            raise PlanError(
                'with Batch(kind="local") a call returns the outputs of the rank\'s own samples: '
                "call the model."
            )
        call = self._forward.call(args, kwargs)
        side = self._forward.side(call, is_cut=True)
        with self.trainer.calls.users.inside("shards", args, kwargs):
            compiled, rank, batch = self._chosen("shards", args, kwargs, side=side)
            rank.step(batch)
        return self._forward.shards(call, compiled, rank.carried)

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Text of a causal model of transformers, by its own ``generate``; the same on all ranks.

        Keys and values of past tokens lie where the plan cuts heads and layers. Prompts of other
        lengths get programs of their own when they first come.

        Args:
            args, kwargs: arguments of ``generate`` of transformers, the same on every rank:
                ``input_ids``, ``attention_mask``, ``max_new_tokens``, ``do_sample`` and so on.

        Returns:
            What it returns: the tokens of prompts and texts.

        Raises:
            PlanError: the model has no ``generate``, or beams are searched.
            ValueError: tokens are sampled, and ranks' random generators differ.
        """
        kwargs = by_name(self._programs.model, args, kwargs)
        with self.trainer.calls.users.inside("generate", (), kwargs):
            with self.trainer.calls.prepared("generate") as request:
                if is_random(self._programs.model, kwargs):
                    state = random_state(self._first.device)
                    request.equal["torch's random state"] = str(checksum(state))
            if self._generator is None:
                device, transport = self._first.device, self._transport
                self._generator = Generator(self._programs, transport, device, self._with_inputs)
            return self._generator.generate(kwargs)

    def _with_inputs(self, call: Mapping[str, Any], side: Side) -> tuple[Rank, dict[str, Any]]:
        _, rank, batch = self._chosen("generate", (), call, side=side)
        return rank, dict(batch)

    def step_guard(self) -> AbstractContextManager[StepGuard]:
        """A block that succeeds on all ranks or that all skip, as ``Trainer.step_guard``."""
        return self.trainer.guard_of([self._first, *self._ranks.values()])

    def recover(self) -> None:
        """Form the connections again after a step that failed, as ``Trainer.recover``."""
        self.trainer.recover_from(self._last)

    def _chosen(
        self,
        name: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        mode: frozenset[str] | None = None,
        side: Side | None = None,
    ) -> tuple[Compiled, Rank, Batch]:
        """The program for a call, this rank of it, ready for a step, and its inputs by name.

        A call that does not train is in ``mode``, as ``Programs.find`` takes it, and may be one of
        the programs of another ``side`` than those that train.
        """
        programs, batches = side or Side(self._programs, self._batches)
        calls, trained = self.trainer.calls, self.trainer.trained
        trains = name == "step"
        find = partial(self._found, trains=trains, mode=mode, side=Side(programs, batches))
        while True:
            with calls.prepared(name) as request:
                self._first.check_ready(trains=trains)
                request.equal |= said_of(self._first) if trains else {}
                self._check_originals()
                call = programs.call(args, kwargs)
                call = call if trains else call.map(Tensor.detach)
                if batches.is_local:
                    check_no_gradients(call.named)
                request.asks = _COMPARES * batches.is_due(call)
                request.asks |= _FREEZES * (trains and trained.is_changed)
                request.form = batches.form(call)
                found = None if batches.is_local else find(request, call)
            if not request.asks & _FREEZES:
                break
            trained.agree(calls)
        whole = call
        if request.asks & _COMPARES or not request.is_one_form:
            # What is made here outlives this call.
            with torch.inference_mode(False):
                whole = batches.whole(call)
        if batches.is_local:
            with calls.prepared(name) as request:
                found = find(request, whole)
        made, batch = found or self._made(name, whole, trains, mode, Side(programs, batches))
        chosen = self._ranks[made.compiled]
        self._switch(made.compiled, chosen)
        if made.compiled not in self._facts:
            self._facts[made.compiled] = Facts(made.compiled, chosen)
        self.facts = self._facts[made.compiled]
        for name in ("draws", "grad_scale", "loss_scale"):
            setattr(chosen, name, getattr(self._first, name))
        return made.compiled, chosen, batch or batches.given(made.compiled, call)

    def _found(
        self,
        request: CallRequest,
        whole: ModelCall,
        trains: bool,
        mode: frozenset[str] | None,
        side: Side,
    ) -> tuple[MadeProgram, Batch] | None:
        """The program for a whole batch if there is one already, and its inputs if known."""
        trained = self.trainer.trained.names if trains else mode
        found = side.programs.find(whole, trained)
        if found is None:
            change = side.programs.change(whole, trained) or "its shape is new"
            request.equal["the program"] = f"one to be made, because {change}"
            return None
        request.equal["the program"] = f"number {found.number}"
        return found, self._inputs(found.compiled, whole, side)

    def _made(
        self, name: str, whole: ModelCall, trains: bool, mode: frozenset[str] | None, side: Side
    ) -> tuple[MadeProgram, Batch]:
        """A new program, and its inputs if known; collective."""
        trained = self.trainer.trained.names if trains else mode
        # What is made here outlives this call, and a later one may compute without inference mode.
        with torch.inference_mode(False), self.trainer.calls.prepared(name) as request:
            made = side.programs.of(whole, trained)
            request.equal |= fingerprint_of(made.compiled)
        sides = [self._programs, *(side.programs for side in self._forward.sides)]
        sides += [] if self._generator is None else [self._generator.side.programs]
        kept = frozenset[Compiled]().union(*(programs.kept for programs in sides))
        self._ranks = {c: rank for c, rank in self._ranks.items() if c in kept}
        self._facts = {c: facts for c, facts in self._facts.items() if c in kept}
        self.meter.settle(set(self._facts.values()))
        with torch.inference_mode(False):
            self._ranks[made.compiled] = self._rank(made.compiled, shares=self._first)
        with self.trainer.calls.prepared(name):
            batch = self._inputs(made.compiled, whole, side)
        return made, batch

    def _inputs(self, compiled: Compiled, whole: ModelCall, side: Side) -> Batch:
        """The inputs of a program, if every rank passes the whole batch; else nothing yet."""
        if side.batches.is_local:
            return {}
        batch = side.batches.given(compiled, whole)
        self._ranks[compiled].check_inputs(batch)
        return batch

    def _switch(self, compiled: Compiled, chosen: Rank) -> None:
        """Let a program follow the one that ran last; collective if it is another one."""
        if chosen is self._last:
            return
        self._last.weights.rest()
        self._last.share_states()
        self._last = chosen
        graph = compiled.plan.graph
        # Programs share buffers, and this one was captured with these values of them.
        chosen.take_buffers({name: graph.buffers[name] for name in graph.folded & {*graph.buffers}})

    def _check_originals(self) -> None:
        if changed := self._programs.originals.changed():
            raise PlanError(
                f"{changed!r} of the model that was captured got other values or was replaced, and "
                "its own values are no longer read: load them by parallel.load_state_dict(...) or "
                "parallel.load. To use the model alone, work with a copy.deepcopy of it; to train "
                "other parameters, call parallelize again."
            )

    def _share_averages(self, compiled: Compiled) -> None:
        """Give every rank the first rank's values of frozen parameters that a forward changes."""
        graph = compiled.plan.graph
        own = {name: graph.buffers[name] for name in sorted(graph.averages)}
        device = torch.device(self._options.get("device", "cpu"))
        share_buffers(own, len(compiled.plan.devices), self._transport, device)

    def _rank(self, compiled: Compiled, shares: Rank | None = None) -> Rank:
        made = compiled.executor(self._transport.rank)
        # Copies, as a training changes buffers, and the model is the caller's.
        values = {name: value.clone() for name, value in compiled.values.items()}
        return Rank(made, self._transport, values, shares=shares, **self._options)


def _loss_of(found: Tensor | Evaluated) -> Tensor:
    return found.loss if isinstance(found, Evaluated) else found
