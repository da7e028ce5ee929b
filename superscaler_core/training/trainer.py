"""Trainer: the user's view of a program on one rank; the training loop is ordinary PyTorch."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from threading import Lock
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from superscaler_core.errors import PlanError
from superscaler_core.ops import mix
from superscaler_core.run.delay import DelayCorrection, scaled_rates
from superscaler_core.run.owners import gathered, owned_by
from superscaler_core.run.rank import Rank
from superscaler_core.run.tables import Stored
from superscaler_core.run.together import norm_of_grads, ranks_of, sum_of_all
from superscaler_core.run.transport import Transport
from superscaler_core.training import resume, training_state
from superscaler_core.training.checkpoint import FORMATS, StoredModel
from superscaler_core.training.checksum import checksum
from superscaler_core.training.first_values import share_buffers
from superscaler_core.training.grad_scaler import GradScaler
from superscaler_core.training.optimizer_state import Keeper
from superscaler_core.training.plain import value_of
from superscaler_core.training.resume import Resumed
from superscaler_core.training.same_call import SameCall
from superscaler_core.training.step_guard import StepGuard, guarded
from superscaler_core.training.stepped import Stepped
from superscaler_core.training.trained import Trained
from superscaler_core.training.training_state import Run, SavedRun
from superscaler_core.training.user_calls import user_call

_NO_TENSOR = torch.empty(0)  # in place of one that a state dict does not have
_SCALED_UPDATES = (
    "a step that updates weights itself (update_with) cannot skip an update whose scaled gradients "
    "overflow: step an optimizer after trainer.step, or compute in bfloat16, which needs no scaler."
)

_RANDOM = Lock()
"""Held while random numbers of torch are drawn: ranks that are threads share its generator."""


class IncompatibleKeys(NamedTuple):
    """Names missing in a state dict, and names unknown to the model, as in torch."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Trainer:
    """One rank's share of the training of one model.

    All calls but ``parameters`` are collective over the program's ranks.

    Args:
        rank: runs the program on this rank.
        transport: moves tensors between ranks.
        originals: the parameters of the model that was captured, if it is kept, by name.

    >>> # trainer = superscaler_core.load("program")          # under torchrun
    >>> # optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-3)
    >>> # loss = trainer.step(tokens, targets)
    >>> # optimizer.step(); optimizer.zero_grad()
    """

    def __init__(
        self,
        rank: Rank,
        transport: Transport,
        originals: Mapping[str, nn.Parameter] = MappingProxyType({}),
    ) -> None:
        self._rank, self._transport = rank, transport
        tables, stored = rank.tables, rank.weights.stored
        self.calls = SameCall(ranks_of(tables), transport)
        """Compares the calls of all ranks."""
        self.stepped = Stepped(tables, stored, originals)
        """The optimizers that step these parameters."""
        self.calls.digests = self.stepped.digests
        self.calls.users.trail = lambda: self._rank.trail
        first = {name: entry.is_trained for name, entry in tables.parameters.items()}
        self.trained = Trained(first, stored, originals)
        """The parameters that are trained now."""
        self.share_states: Callable[[], None] = rank.share_states
        """Brings buffers that steps changed to all ranks; collective."""
        self.optimizers: dict[str, torch.optim.Optimizer] = {}
        """The optimizers that ``update_with`` made, by the first parameter of each."""
        self._makes_optimizers = False
        self._resumed: Resumed | None = None

    @property
    def rank(self) -> int:
        """This rank's number, which is also its device in the plan."""
        return self._rank.tables.rank

    @property
    def transport(self) -> Transport:
        """Moves tensors between the ranks."""
        return self._transport

    @property
    def device(self) -> torch.device:
        """Where this rank computes."""
        return self._rank.device

    @property
    def entries(self) -> Mapping[str, Stored]:
        """How the ranks store every parameter, by name, in the order of the model."""
        return self._rank.tables.parameters

    @property
    def aliases(self) -> Mapping[str, str]:
        """Further names of parameters."""
        return self._rank.tables.aliases

    def stored_dtype(self, name: str) -> torch.dtype:
        """The dtype in which a parameter is stored."""
        return self._rank.weights.stored_dtype(name)

    @property
    def num_microbatches(self) -> int:
        """The number of microbatches in a step."""
        return self._rank.tables.num_microbatches

    @property
    def is_asynchronous(self) -> bool:
        """Whether a step updates weights between microbatches, and so needs ``update_with``."""
        return self._rank.tables.microbatches_per_update is not None

    # --- training -------------------------------------------------------------------------------

    def step(self, *batch: Tensor, **named: Tensor) -> Tensor:
        """Run forward and backward of a global batch; leave gradients where optimizers read them.

        Args:
            batch: the model's inputs by position. Every rank passes the same whole batch: dim 0 is
                ``num_microbatches`` times that of the captured input. Each rank uses its part.
            named: inputs by name.

        Returns:
            The mean loss of the microbatches, a scalar, the same on all ranks.

        Raises:
            ValueError: an input is missing, unknown, or given twice; or it has another shape or
                dtype, or requires a gradient.
            RuntimeError: gradients are switched off (``torch.no_grad``), as of torch's backward.
            PlanError: parameters have no values yet; or the program updates weights between
                microbatches, and has no optimizer (``update_with``); or ranks make other calls.
        """
        with self.calls.users.inside("step", batch, named):
            while True:
                with self.calls.prepared("step") as request:
                    request.asks = self.trained.is_changed
                    request.equal |= said_of(self._rank)
                    inputs = self._inputs(batch, named)
                    self._check_trained()
                    check_no_gradients(inputs)
                    self._rank.check_inputs(inputs)
                    self._rank.check_ready(trains=self._rank.trains)
                if not request.asks:
                    return self._rank.step(inputs)
                self.trained.agree(self.calls)

    def _check_trained(self) -> None:
        """Refuse to train a parameter that was frozen when the program was made."""
        parameters = self._rank.tables.parameters
        if new := [name for name in self.trained.names if not parameters[name].is_trained]:
            raise PlanError(
                f"requires_grad of {min(new)!r} was set to True, and the program was made for a "
                "frozen parameter, so it has no gradient: capture and compile the model again, or "
                "use parallelize, which makes a program for every set of trained parameters."
            )

    def _inputs(self, batch: Sequence[Tensor], named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs of a step by name."""
        if self.is_asynchronous and not self._makes_optimizers:
            raise PlanError(
                "this program updates weights between microbatches: tell it by update_with how to "
                "make its optimizers, and step none after trainer.step."
            )
        names, arguments = list(self._rank.tables.inputs), self._rank.tables.arguments
        named = {arguments.get(name, name): tensor for name, tensor in named.items()}
        if len(batch) > len(names):
            raise ValueError(
                f"step takes {len(names)} inputs ({', '.join(names)}), got {len(batch)}."
            )
        free = names[len(batch) :]
        if odd := [name for name in named if name not in free]:
            raise ValueError(
                f"step got {', '.join(odd)} by name; after {len(batch)} inputs by position it "
                f"takes {', '.join(free) or 'none'}."
            )
        return {**dict(zip(names, batch, strict=False)), **named}

    @contextmanager
    def scaled(self, factor: float) -> Iterator[None]:
        """Inside this context steps leave ``factor`` times the gradients of their loss.

        For accumulation, as ``(loss / 4).backward()`` in torch. ``step`` returns the loss itself.

        >>> # for part in parts:
        >>> #     with trainer.scaled(1 / len(parts)):
        >>> #         trainer.step(**part)
        >>> # optimizer.step(); optimizer.zero_grad()

        Args:
            factor: a finite number, the same on all ranks.
        """
        if not math.isfinite(factor):
            raise ValueError(f"scaled takes a finite factor, not {factor}.")
        before, self._rank.loss_scale = self._rank.loss_scale, float(factor)
        try:
            yield
        finally:
            self._rank.loss_scale = before

    def step_guard(self) -> AbstractContextManager[StepGuard]:
        """A block of steps that succeeds on all ranks, or that all ranks skip together.

        If the block raises on a rank, no rank raises: gradients, buffers and the counts of random
        draws are as they were before the block on all of them, connections are formed again, all
        ranks warn, and ``skipped`` says so. An interrupt is raised, and a rank that is lost is a
        ``CommError`` as ever. A block that succeeds costs two exchanges of a number, and a copy of
        the gradients that were there before. All ranks of the process group take part.

        >>> # with trainer.step_guard() as guard:
        >>> #     loss = trainer.step(tokens, targets)
        >>> # if guard.skipped:
        >>> #     continue                                      # with the next batch
        >>> # optimizer.step(); optimizer.zero_grad()

        Raises:
            PlanError: steps update weights themselves, so a step cannot be undone.
        """
        return self.guard_of([self._rank])

    def guard_of(self, ranks: Sequence[Rank]) -> AbstractContextManager[StepGuard]:
        """``step_guard`` of a model that several programs share, by this rank of each."""
        if self._makes_optimizers or self.is_asynchronous:
            raise PlanError(
                "step_guard: steps of this trainer update weights themselves (update_with), so a "
                "step that failed cannot be undone; load the latest checkpoint after recover()."
            )
        return guarded(ranks, self._transport)

    def recover(self) -> None:
        """Form the connections again after a step that failed on some rank; collective.

        Without ``step_guard`` the failed step is half done. Its gradients are dropped here on all
        ranks, and all get the first rank's buffers, which may have seen the batch. Parameters are
        as before, unless steps update them (``update_with``); ``load`` restores everything. All
        ranks of the process group take part.

        Raises:
            CommError: a rank did not come within the group's timeout.
        """
        self.recover_from(self._rank)

    def recover_from(self, last: Rank) -> None:
        """``recover`` of a model that several programs share, by this rank of the last that ran."""
        tables, (seed, num) = self._rank.tables, self._rank.draws
        self._transport.fail(RuntimeError("the trainer recovers"))
        counts = self._transport.restart(str(num))
        self._rank.draws = seed, max(map(int, counts))
        for parameter in self.parameters():
            parameter.grad = None
        last.share_states()
        share_buffers(last.changing, tables.num_ranks, self._transport, last.device)

    @property
    def results(self) -> Mapping[str, Tensor]:
        """The last step's results that the model was captured to return beside the loss, by name.

        Each is whole on every rank: microbatches follow each other along the dim of the samples, as
        in the batch. A scalar is the mean over microbatches, in float64 if it is an integer or a
        bool.
        """
        return self._rank.results

    def update_with(
        self,
        make: Callable[[Sequence[nn.Parameter]], torch.optim.Optimizer],
        *,
        correction: DelayCorrection | None = None,
    ) -> None:
        """Let steps update weights themselves, where the program has an ``update``.

        Without this, a step only leaves gradients, and the caller steps an optimizer. A step of an
        asynchronous pipeline has several updates, and needs this.

        Args:
            make: creates an optimizer of the parameters of one update, for example of a stage. It
                is called at the first update. Gradients are freed after each update.
            correction: of delayed gradients, such as ``published.asynchronous.PipeMare``.

        Raises:
            PlanError: gradients are scaled by a ``grad_scaler``, or corrections are given to a
                program that they are not for.
        """
        if self._rank.grad_scale is not None:
            raise PlanError(_SCALED_UPDATES)
        delays, weights = self._rank.tables.delays, self._rank.tables.weights
        if correction is not None:
            self._check_corrected(correction)
            if correction.corrects_weights:
                taus = {n: delays.get(n, delays.get(w.name, 0.0)) for n, w in weights.items()}
                self._rank.corrected = correction.weights(taus)
        num_updates = Counter[str]()

        def update(names: Sequence[str]) -> None:
            stored = self._rank.weights.stored
            if names[0] not in self.optimizers:
                made = self.optimizers[names[0]] = make([stored[name] for name in names])
                if self._resumed is not None:
                    self._resumed.into(Keeper(made, stored))
            optimizer, tau = self.optimizers[names[0]], delays.get(names[0], 0.0)
            rate = 1.0 if correction is None else correction.rate(tau, num_updates[names[0]])
            num_updates[names[0]] += 1
            with scaled_rates(optimizer, rate):
                optimizer.step()
            optimizer.zero_grad()

        self._rank.updates, self._makes_optimizers = update, True

    def _check_corrected(self, correction: DelayCorrection) -> None:
        """Refuse corrections of a program whose gradients are not delayed as they assume."""
        tables = self._rank.tables
        if tables.microbatches_per_update is None:
            raise PlanError(f"{correction}: this program updates after a step, without delay.")
        if correction.corrects_weights and not tables.one_version:
            raise PlanError(
                f"{correction}: this program keeps the versions that its forwards read, so there "
                "is no difference to correct; leave the correction of weights out, or take a plan "
                "that keeps one version."
            )

    @user_call
    def clip_grad_norm_(
        self,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = False,
        foreach: bool | None = None,
    ) -> Tensor:
        """Scale gradients so that their norm over the whole model is at most ``max_norm``.

        Args:
            max_norm: the largest norm.
            norm_type: p of the p-norm, above zero; may be infinite.
            error_if_nonfinite: whether a norm that is infinite or NaN is an error.
            foreach: whether to scale by torch's grouped kernels; if None, where they are fast.

        Returns:
            The norm before scaling, on every rank, with the dtype that
            ``torch.nn.utils.clip_grad_norm_`` returns for the whole model.

        Raises:
            RuntimeError: the norm is not finite and ``error_if_nonfinite`` is set; on all ranks.
            PlanError: the program updates weights between microbatches.
        """
        with self.calls.prepared("clip_grad_norm_") as request:
            request.equal |= {"max_norm": str(float(max_norm)), "norm_type": str(float(norm_type))}
            if self.is_asynchronous:
                raise PlanError(
                    "clip_grad_norm_: stages of this program update at different times, so "
                    "gradients of the whole model do not exist at one time; clip in the "
                    "optimizers' step."
                )
            if not norm_type > 0:
                raise ValueError(f"clip_grad_norm_ takes a norm_type above zero, got {norm_type}.")
        stored = self._rank.weights.stored
        grads = {name: w.grad for name, w in stored.items() if w.grad is not None}
        norm = norm_of_grads(grads, norm_type, self._rank.tables, self._transport)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(
                f"the norm of order {norm_type} of all gradients is {norm.item()}; to clip anyway, "
                "pass error_if_nonfinite=False."
            )
        nn.utils.clip_grads_with_norm_(stored.values(), max_norm, norm, foreach)
        return norm.to(self._rank.device, self._rank.weights.trained_dtype)

    def grad_scaler(self, **options: Any) -> GradScaler:
        """A gradient scaler: from now on, steps leave gradients that are scaled by it.

        Use it as ``torch.amp.GradScaler``, without ``scaler.scale``: a step scales the loss for its
        backward, and returns it unscaled. ``unscale_`` and ``step`` are collective, because all
        ranks skip an update if a gradient overflows on one of them.

        >>> # scaler = trainer.grad_scaler()
        >>> # loss = trainer.step(tokens, targets)
        >>> # scaler.unscale_(optimizer); trainer.clip_grad_norm_(1.0)
        >>> # scaler.step(optimizer); scaler.update(); optimizer.zero_grad()

        Args:
            options: those of ``torch.amp.GradScaler``, except the device.

        Raises:
            PlanError: steps update weights themselves.
        """
        if self._makes_optimizers or self.is_asynchronous:
            raise PlanError(_SCALED_UPDATES)
        tables, transport = self._rank.tables, self._transport

        def total(value: Tensor) -> Tensor:
            with self.calls.prepared("unscale_"):
                pass
            return sum_of_all(value, tables, transport)

        scaler = GradScaler(self._rank.device, total, **options)
        self._rank.grad_scale = scaler.get_scale
        return scaler

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The boxes of parameters that this rank stores, by their single-device names."""
        yield from self._rank.weights.stored.items()

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of ``named_parameters`` without names, as optimizers expect."""
        yield from self._rank.weights.stored.values()

    # --- parameters as on a single device -------------------------------------------------------

    @user_call
    def load_state_dict(self, state: Mapping[str, Tensor], strict: bool = True) -> IncompatibleKeys:
        """Take this rank's boxes from whole parameters and buffers, by single-device names.

        Args:
            state: a state dict like that of the captured model (``torch.nn.Module.state_dict``).
            strict: whether missing and unexpected names are an error.

        Returns:
            The missing names, and the unexpected ones.

        Raises:
            PlanError: a tensor is missing, unexpected (if strict) or has another shape; or a buffer
                differs from the value from which the capture computed constants; or ranks were
                given other values. On all ranks, and nothing is changed.
        """
        tables, shapes = self._rank.tables, self._rank.shapes
        missing = [name for name in shapes if name not in state]
        unexpected = [n for n in state if n not in shapes and n not in tables.extra]
        with self.calls.prepared("load_state_dict", strict=str(strict)) as request:
            self._check_state(state, missing, unexpected, strict=strict)
            if len(self.calls.ranks) > 1:
                request.equal["the state dict"] = _lines_of(state)
        for name in filter(state.__contains__, shapes):
            if name in tables.buffers:
                self._rank.constant(name).copy_(state[name])
            else:
                self._take(tables.aliases.get(name, name), state[name])
        self.stepped.restart()
        return IncompatibleKeys(missing, unexpected)

    def _check_state(
        self,
        state: Mapping[str, Any],
        missing: Sequence[str],
        unexpected: Sequence[str],
        *,
        strict: bool,
    ) -> None:
        shapes = self._rank.shapes
        if odd := [name for name in shapes if not isinstance(state.get(name, _NO_TENSOR), Tensor)]:
            kind = type(state[odd[0]]).__name__.removesuffix("Type")
            raise PlanError(f"load_state_dict: {odd[0]!r} is {kind}, not a tensor.")
        if odd := [n for n in shapes if n in state and state[n].is_meta]:
            raise PlanError(f"load_state_dict: {odd[0]!r} is on the meta device, without values.")
        faults = [
            f"size mismatch for {name}: copying a param with shape {list(state[name].shape)} from "
            f"checkpoint, the shape in current model is {list(shape)}"
            for name, shape in shapes.items()
            if name in state and tuple(state[name].shape) != shape
        ]
        if strict:
            faults += [f"Missing key(s) in state_dict: {_quoted(missing)}"] if missing else []
            found = _quoted(unexpected)
            faults += [f"Unexpected key(s) in state_dict: {found}"] if unexpected else []
        faults += self._rank.buffer_faults(state)
        if faults:
            raise PlanError(f"load_state_dict: {'; '.join(faults)}.")

    @user_call
    def init_weights(self, init: Callable[[str, Tensor], object], seed: int = 0) -> None:
        """Give every parameter its first values, the same as on a single device.

        Args:
            init: fills a whole parameter, given its name.
            seed: seed of torch's random numbers in ``init``; every parameter gets its own.

        Raises:
            PlanError: ``init`` made other values on some rank, for example with random numbers that
                are not torch's; on all ranks, and nothing is changed.
        """
        boxes: dict[str, Tensor] = {}
        with self.calls.prepared("init_weights", seed=str(seed)) as request:
            lines = []
            for number, (name, entry) in enumerate(self._rank.tables.parameters.items()):
                whole = torch.empty(entry.model_shape, dtype=getattr(torch, entry.dtype))
                with _RANDOM, torch.random.fork_rng(devices=[]), torch.no_grad():
                    torch.manual_seed(mix(seed, number))
                    init(name, whole)
                lines.append(f"{name}: {checksum(whole)}")
                if entry.box is not None:
                    # A copy, because a view would keep the memory of the whole parameter.
                    boxes[name] = entry.taken(whole).clone()
            request.equal["the values"] = "\n".join(lines)
        with torch.no_grad():
            for name, box in boxes.items():
                self._rank.weights.stored[name].copy_(box)
        self.stepped.restart()

    def _take(self, name: str, whole: Tensor) -> None:
        """Store this rank's box of a parameter."""
        entry = self._rank.tables.parameters[name]
        if entry.box is not None:
            with torch.no_grad():
                self._rank.weights.stored[name].copy_(entry.taken(whole))

    @user_call
    def save(
        self,
        folder: str | Path,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
        step: int | None = None,
        extra: Any = None,
        format: str = FORMATS[0],
    ) -> None:
        """Write a checkpoint, each rank its own boxes; ``rvdcomm reshard`` converts its layouts.

        With any of the options, or if steps update weights, the checkpoint also has the state of
        the run: the states of optimizer, scheduler and scaler, ``step``, ``extra``, the random
        state of every rank, and that of dropout. If a process dies during the save, the folder
        cannot be loaded; a later save completes it.

        Args:
            folder: a new folder that all ranks share.
            optimizer: one or several optimizers over ``parameters()``, which work element by
                element, as Adam does.
            scheduler: one or several schedulers of learning rates.
            scaler: the scaler that ``grad_scaler`` returned.
            step: the number of steps that were taken.
            extra: a plain value: numbers, texts, lists, dicts, small tensors.
            format: "safetensors", or "dcp" for the files of ``torch.distributed.checkpoint``.

        Raises:
            CheckpointError: a state cannot be saved, the folder holds a checkpoint already, or a
                rank could not write; the same on all ranks, whichever has the fault.
        """
        with self.calls.prepared("save"):
            run = self._run(optimizer, scheduler, scaler=scaler, step=step, extra=extra)
        training_state.save(folder, self.stored_model, run, format)

    @user_call
    def load(
        self,
        folder: str | Path,
        *,
        optimizer: Any = None,
        scheduler: Any = None,
        scaler: Any = None,
    ) -> SavedRun:
        """Read this rank's boxes from a checkpoint with any layouts, or from a single device.

        With an optimizer, or after ``update_with``, the run is resumed: also on another plan and
        another number of ranks, it continues as it would have without a break. Otherwise only
        parameters and buffers are read. All ranks take what one save has, or no rank changes
        anything.

        Args:
            folder: a folder that ``save`` or ``save_run`` wrote; any checkpoint of the model if no
                run is resumed.
            optimizer, scheduler, scaler: as given to ``save``; each takes its state.

        Returns:
            The ``step`` and ``extra`` that were saved with the run, also if it is not resumed.

        Raises:
            CheckpointError: a tensor is missing, damaged or has another shape; the checkpoint has
                no state of the run, or one of another optimizer, other groups or another scheduler;
                a buffer differs from the value from which the capture computed constants; or ranks
                read different saves. The same on all ranks, whichever has the fault.
        """
        with self.calls.prepared("load"):
            run = self._run(optimizer, scheduler, scaler=scaler)
        is_resumed = self._makes_optimizers or not run.is_empty
        resumed = resume.load(folder, self.stored_model, run, resume=is_resumed)
        self.stepped.restart()
        if is_resumed:
            self._resumed = resumed
            self._rank.draws = resumed.dropout or self._rank.draws
        return resumed.saved

    def _run(self, optimizer: Any, scheduler: Any, **fields: Any) -> Run:
        if self._makes_optimizers and optimizer is None:
            optimizer = self.optimizers
        rank = self._rank
        return Run.of(optimizer, scheduler, device=rank.device, dropout=rank.draws, **fields)

    @property
    def stored_model(self) -> StoredModel:
        """The model as this rank stores it, with buffers as the last step left them; collective."""
        tables = self._rank.tables
        self.share_states()
        buffers = {name: self._rank.constant(name) for name in tables.buffers}
        faults = self._rank.buffer_faults
        return StoredModel.of_program(tables, self._rank.weights, buffers, faults, self._transport)

    @user_call
    def state_dict(
        self, *, rank0_only: bool = False, trained_only: bool = False
    ) -> dict[str, Tensor]:
        """All parameters and buffers, whole, by their single-device names.

        Args:
            rank0_only: whether the first rank alone gets them; the others get nothing.
            trained_only: whether to leave out buffers and what is frozen, such as all but adapters.
        """
        tables, weights = self._rank.tables, self._rank.weights
        with self.calls.prepared("state_dict") as request:
            request.equal |= {"rank0_only": str(rank0_only), "trained_only": str(trained_only)}
        names = self.trained.names if trained_only else tables.parameters.keys()
        entries = {name: entry for name, entry in tables.parameters.items() if name in names}
        ranks = self.calls.ranks[:1] if rank0_only else self.calls.ranks
        dtypes = {name: weights.stored_dtype(name) for name in entries}
        owned = {name: owned_by(ranks, entry, dtypes[name]) for name, entry in entries.items()}
        shards = {name: shard[0] for name in entries if (shard := weights.shard(name)) is not None}
        found = gathered(self._transport, owned, shards)
        self.share_states()
        if self.rank not in ranks:
            return {}
        # Nothing moves for a parameter without elements.
        found |= {
            name: torch.empty(entry.model_shape, dtype=dtypes[name])
            for name, entry in entries.items()
            if not math.prod(entry.shape)
        }
        # What stays where it is would change with the next step.
        found = {n: found[n].clone() if owned[n].stays else found[n] for n in entries}
        found |= {alias: found[name] for alias, name in tables.aliases.items() if name in found}
        if trained_only:
            return found
        buffers = {name: self._rank.constant(name).clone() for name in tables.buffers}
        # What modules add (get_extra_state) is as it was at the capture.
        extra = {name: value_of(text) for name, text in tables.extra.items()}
        return {**found, **buffers, **extra}


def check_no_gradients(batch: Mapping[str, Any]) -> None:
    """Refuse inputs that require gradients, which only a ``Parallel`` of whole batches gives.

    Raises:
        ValueError: an input requires a gradient.
    """
    for name, value in batch.items():
        if isinstance(value, Tensor) and value.requires_grad:
            raise ValueError(
                f"input {name!r} requires a gradient, and this step gives gradients to parameters "
                "of its model alone: detach it, or let parallelize make a model of whole batches."
            )


def said_of(rank: Rank) -> dict[str, str]:
    """What a step of this rank assumes that all ranks do."""
    scale = rank.loss_scale
    return {} if scale == 1.0 else {"the factor of scaled(...)": str(scale)}


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(f'"{name}"' for name in names)


def _lines_of(state: Mapping[str, Any]) -> str:
    """A line for every tensor of a state dict, by name; equal for equal values."""
    return "\n".join(
        f"{name} {list(value.shape)} {value.dtype} with checksum {checksum(value):x}"
        for name, value in sorted(state.items())
        if isinstance(value, Tensor)
    )
