"""Rank: what the instructions of a program do on one rank; runs one training step there."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType, ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.ops import mix
from superscaler_core.run.carrier import Carrier
from superscaler_core.run.host import Host
from superscaler_core.run.moves import move_many
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.pipemare import Discrepancy
from superscaler_core.run.segment_runner import SegmentRunner
from superscaler_core.run.tables import Leg, Tables, box_of
from superscaler_core.run.tape import Tape
from superscaler_core.run.transport import Transport
from superscaler_core.run.way import Way
from superscaler_core.run.weights import WeightStore

_NOTHING: Mapping[str, int] = MappingProxyType({})


class RankProgram(Protocol):
    """The program of one rank: an ``Executor`` of its instructions, or its printed file, imported.

    Attributes:
        TABLES: its data.
        step: runs one step by calling the methods of a rank.
    """

    @property
    def TABLES(self) -> Tables: ...  # noqa: N802 - as in printed files

    def step(self, rank: Any, /) -> None: ...


class Rank(SegmentRunner):
    """Does what the instructions of a program say.

    The tape runs segments, the carrier moves tensors of edges, and the store holds the weights.

    Args:
        program: the program.
        transport: moves tensors between ranks.
        constants: values of the model that depend on no input.
        seed: seed of dropout.
        dtype: dtype of stored parameters; that of the model if None.
        device: where tensors live.
        host: the place of tensors that the program stores on the host or swaps.
        shares: a rank of another program whose stored parameters and buffers this one uses.
    """

    def __init__(
        self,
        program: RankProgram | ModuleType,
        transport: Transport,
        constants: Mapping[str, Tensor],
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        host: Host | None = None,
        shares: Rank | None = None,
    ) -> None:
        self.tables: Tables = program.TABLES
        host = host or Host(device)
        stored = None if shares is None else shares.weights.stored
        self.weights: WeightStore = WeightStore(self.tables, transport, dtype, device, host, stored)
        self.device = torch.device(device)
        super().__init__(Tape(self.tables.recomputed, self.tables.swapped, host))
        self._carrier = Carrier(self.tables, transport, self.device)
        self._step: Callable[[Rank], None] = program.step
        self._transport = transport
        self._constants = {name: value.to(device) for name, value in constants.items()}
        if shares is not None:
            assert shares.boxes == self.boxes, "both programs store the same"
            names = {*self.tables.buffers, *self.tables.states, *shares.tables.states}
            self._constants |= {n: v for n, v in shares._constants.items() if n in names}
        self._seed, self._num_steps = seed, 0
        self.trains = any(weight.reduce for weight in self.tables.weights.values())
        loss_dtype: torch.dtype = getattr(torch, self.tables.loss_dtype)
        num = self.tables.num_microbatches
        per_update = self.tables.microbatches_per_update or num
        shares_of = {
            n: torch.tensor(1.0 / n, dtype=loss_dtype, device=device) for n in (num, per_update)
        }
        self._loss_share, self._grad_share = shares_of[num], shares_of[per_update]
        self.loss_grad = self._grad_share
        self.discrepancy: Discrepancy | None = None
        self.grad_scale: Callable[[], float] | None = None
        self._batch: Mapping[str, Tensor | OwnSamples] = {}
        self._loss: Tensor | None = None
        self._total = torch.zeros((), dtype=loss_dtype, device=device)
        self.results: Mapping[str, Tensor] = {}
        self._turn: tuple[int, ...] = ()
        self._states: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}
        self.updates: Callable[[Sequence[str]], object] = lambda _: None
        scalar = rv.Box((), ())
        self._way_of_loss = Way(transport, self.tables.loss, scalar, scalar)

    @property
    def draws(self) -> tuple[int, int]:
        """The seed of dropout and the number of steps so far; they determine all masks."""
        return self._seed, self._num_steps

    @draws.setter
    def draws(self, value: tuple[int, int]) -> None:
        self._seed, self._num_steps = value

    # --- a step ---------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, Tensor | OwnSamples]) -> Tensor:
        """Run forward and backward of a global batch; returns the loss, the same on all ranks.

        Args:
            batch: every input, whole: ``num_microbatches`` times the captured batch along the dim
                of the samples; or the part of it that this rank reads. The checks below accept it.
        """
        self._batch = batch
        self._loss = None
        if self.grad_scale is not None:
            self.loss_grad = self._grad_share * self.grad_scale()
        self._num_steps += 1
        if self.discrepancy is not None:
            self.discrepancy.restart()
        try:
            self._step(self)
            self._tape.check_done()
            self.weights.check_done()
            self.weights.end_versions()
            self.results = self._brought()
            self._carrier.finish()
        except BaseException as error:
            self._forget()
            # The others count on the rest of this step.
            if self.tables.num_ranks > 1:
                self._transport.fail(error)
            raise
        self._states.clear()
        return self._total

    def _forget(self) -> None:
        """The step has failed: drop what it left, so that the next one does not depend on it."""
        self._carrier.forget()
        self._tape.forget()
        self.weights.forget()
        self._states.clear()
        self._with_grad, self._turn = True, ()

    def _brought(self) -> dict[str, Tensor]:
        """The results of a step: microbatches joined along their samples, and scalars averaged."""
        edges: dict[tuple[str, int | None], list[str]] = {}
        for edge, result in self.tables.results.items():
            edges.setdefault(result, []).append(edge)
        found = {}
        for (name, dim), mine in edges.items():
            values = [self._carrier.brought(mine, mb) for mb in range(self.tables.num_microbatches)]
            # A single microbatch may have a result without samples.
            found[name] = torch.cat(values, dim or 0) if values[0].dim() else _mean(values)
        return found

    def check_ready(self, *, trains: bool) -> None:
        """Refuse a step that cannot run whatever its batch, before any rank communicates.

        Raises:
            RuntimeError: gradients are switched off where a step trains, as of torch's backward.
            PlanError: parameters have no values yet; or the step runs under ``torch.autocast``.
        """
        if trains and not (torch.is_grad_enabled() and not torch.is_inference_mode_enabled()):
            raise RuntimeError(
                "element 0 of tensors does not require grad and does not have a grad_fn: a step "
                "runs the backward of its loss, and it is called under torch.no_grad() or "
                "torch.inference_mode(); call it outside of them (evaluate needs no gradients)."
            )
        if torch.is_autocast_enabled(self.device.type):
            raise PlanError(
                "a step runs under torch.autocast, and its program casts what the capture says: "
                "capture or parallelize the model under torch.autocast, and step outside of it."
            )
        self.weights.check_given()

    def check_inputs(self, batch: Mapping[str, Tensor | OwnSamples]) -> None:
        """Refuse a batch that does not fit the program, before any rank communicates.

        Raises:
            ValueError: an input has another shape or dtype, or requires a gradient.
        """
        for name, value in batch.items():
            if isinstance(value, Tensor) and value.requires_grad:
                raise ValueError(
                    f"input {name!r} requires a gradient, and a step gives gradients to parameters "
                    "of its model alone: detach it, or make what computes it a part of the model."
                )
        for name, (shape, dtype) in self.tables.inputs.items():
            num, dim = self.tables.num_microbatches, self.tables.samples_dim(name)
            want = tuple(size * num if i == dim else size for i, size in enumerate(shape))
            given = batch.get(name)
            if isinstance(given, OwnSamples):
                continue
            form = None if given is None else (tuple(given.shape), _name(given.dtype))
            if form != (want, dtype):
                got = "nothing" if form is None else f"{list(form[0])} {form[1]}"
                cut = f"{num} microbatches of {list(shape)} along dim {dim}"
                raise ValueError(
                    f"input {name!r} got {got}; a step takes {list(want)} {dtype}: "
                    f"{'the same for all microbatches' if dim is None else cut}."
                )

    def begin(self) -> None:
        """Refresh the copies of weights that this rank makes from its own storage."""
        self.weights.begin()

    def update(self, names: Sequence[str], keeps: int = 0) -> None:
        """Put gradients of parameters where optimizers read them, and run the step's optimizers.

        If ``updates`` does nothing, the caller steps the optimizer after the step.

        Args:
            names: the parameters.
            keeps: for an update between microbatches, the number of versions that exist after it.
        """
        if not keeps:
            self.weights.settle(names)
            self.updates(names)
            return
        stored = [name for name in names if name in self.weights.stored]
        self.weights.update(names, keeps, lambda: self.updates(stored) if stored else None)
        if self.discrepancy is not None:
            self.discrepancy.look(self.weights.newest(()))

    def reads(
        self,
        stage: Callable[[Rank, int], None],
        mb: int,
        version: int,
        borrowed: Mapping[str, int] = _NOTHING,
    ) -> None:
        """Run a stage's forward with a version of its weights; version 0 needs no such call.

        Args:
            stage: the function of the stage's forward.
            mb: the microbatch.
            version: the version of the stage's own weights.
            borrowed: the versions of copies of weights that belong to other stages.
        """
        versions = self.weights.versions
        versions.read, versions.borrowed = version, borrowed
        stage(self, mb)
        versions.read, versions.borrowed = 0, _NOTHING

    def reads_back(
        self,
        stage: Callable[[Rank, int], None],
        mb: int,
        version: int,
        borrowed: Mapping[str, int] = _NOTHING,
    ) -> None:
        """Like ``reads``, for a backward, whose weights may be corrected (``PipeMare``)."""
        if self.discrepancy is None:
            self.reads(stage, mb, version, borrowed)
            return
        with self.discrepancy.corrected(self.weights.newest(borrowed)):
            self.reads(stage, mb, version, borrowed)

    def total_loss(self) -> None:
        """Sum the losses of all microbatches over all ranks."""
        total = self._way_of_loss.move(self._loss)
        assert total is not None, "every rank gets the loss"
        self._total = total

    # --- arguments of segments ------------------------------------------------------------------

    def input(self, key: str, mb: int) -> Tensor:
        """A box of a microbatch's input, by its key in ``Tables.boxes``."""
        name, box = self.tables.boxes[key]
        shape, _ = self.tables.inputs[name]
        whole = self._batch[name]
        if isinstance(whole, OwnSamples):
            return whole.of(mb, box_of(box)).to(self.device)
        dim = self.tables.samples_dim(name)
        part = whole if dim is None else whole.narrow(dim, mb * shape[dim], shape[dim])
        cut = part[box_of(box).slices_within(rv.Box.of_shape(shape))]
        return cut.to(self.device)

    def constant(self, name: str) -> Tensor:
        """A value of the model that depends on no input."""
        return self._constants[name]

    @property
    def changing(self) -> Mapping[str, Tensor]:
        """The buffers that a step may replace the values of."""
        names = {*self.tables.buffers, *self.tables.states}
        return {name: self._constants[name] for name in names if name in self._constants}

    def state(self, name: str, mb: int) -> Tensor:
        """The value of a buffer for a microbatch; a recomputation gets the same value."""
        key = name, mb, self._turn
        if key not in self._states:
            self._states[key] = self._constants[name].clone()
        return self._states[key]

    def keep_state(self, name: str, value: Tensor) -> None:
        """Replace a buffer, for the microbatches that follow."""
        self._constants[name].copy_(value)

    def share_states(self) -> None:
        """Bring buffers that steps replaced to all ranks; collective."""
        states = self.tables.states
        moves = {name: (legs, self._held(name, legs)) for name, legs in states.items()}
        for name, _, value in move_many(self._transport, moves):
            self._constants[name].copy_(value)

    def _held(self, name: str, legs: Sequence[Leg]) -> tuple[Tensor, rv.Box] | None:
        value = self._constants[name]
        is_held = any(self.tables.rank in leg.layouts[0].ranks for leg in legs)
        return (value, rv.Box.of_shape(tuple(value.shape))) if is_held else None

    @property
    def boxes(self) -> dict[str, str | None]:
        """The box that this rank stores of every parameter, as a text."""
        return {name: entry.box for name, entry in self.tables.parameters.items()}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of all entries of the model's ``state_dict``, by name."""
        parameters = {name: entry.model_shape for name, entry in self.tables.parameters.items()}
        aliases = {alias: parameters[name] for alias, name in self.tables.aliases.items()}
        buffers = {name: tuple(self._constants[name].shape) for name in self.tables.buffers}
        return {**parameters, **aliases, **buffers}

    def take_buffers(self, values: Mapping[str, Tensor]) -> None:
        """Give buffers the values from which the capture computed constants."""
        for name, value in values.items():
            self._constants[name].copy_(value)

    def buffer_faults(self, state: Mapping[str, Tensor]) -> list[str]:
        """Reasons why buffers cannot take the values in ``state``."""
        return [
            f"buffer {name} has other values, and the capture computed constants of it: capture "
            "the model with the values that it is to have"
            for name, is_folded in self.tables.buffers.items()
            if is_folded and name in state and state[name].shape == self._constants[name].shape
            and not torch.equal(state[name].to(self._constants[name]), self._constants[name])
        ]  # fmt: skip

    def use(self, name: str) -> Tensor:
        """The copy of a weight that segments read."""
        return self.weights.copy(name)

    # --- weights and their gradients; started communication runs while the rank continues -------

    def fetch(self, names: Sequence[str]) -> None:
        """Fetch weights to where they are read, for the whole step."""
        self.weights.fetch(names)

    def start_fetch(self, names: Sequence[str]) -> None:
        """Start to fetch weights."""
        self.weights.start_fetch(names)

    def wait_fetch(self, names: Sequence[str]) -> None:
        """Wait for ``start_fetch``."""
        self.weights.wait_fetch(names)

    def gather(self, names: Sequence[str]) -> None:
        """Gather the weights of a window."""
        self.weights.gather(names)

    def start_gather(self, names: Sequence[str]) -> None:
        """Start to gather the weights of a window."""
        self.weights.start_gather(names)

    def wait_gather(self, names: Sequence[str]) -> None:
        """Wait for ``start_gather``."""
        self.weights.wait_gather(names)

    def drop(self, names: Sequence[str]) -> None:
        """Drop the weights of a window."""
        self.weights.drop(names)

    def reduce(self, names: Sequence[str]) -> None:
        """Reduce gradients of weights; drop the weights if they were gathered."""
        self.weights.reduce(names)
        self._drop_gathered(names)

    def start_reduce(self, names: Sequence[str]) -> None:
        """Start to reduce gradients of weights; drop the weights if they were gathered."""
        self.weights.start_reduce(names)
        self._drop_gathered(names)

    def wait_reduce(self, names: Sequence[str]) -> None:
        """Wait for ``start_reduce``."""
        self.weights.wait_reduce(names)

    def _drop_gathered(self, names: Sequence[str]) -> None:
        self.weights.drop(n for n in names if self.tables.weights[n].windowed == "gather")

    def _rng(self, mb: int) -> int:
        return mix(self._seed, self._num_steps, mb, *self._turn)

    # --- turns ----------------------------------------------------------------------------------

    def without_grad(self, stage: Callable[[Rank, int], None], mb: int, turn: int) -> None:
        """Run a stage's forward without gradient: only its results remain.

        Args:
            stage: the function of the stage's forward.
            mb: the microbatch.
            turn: the number of this forward among those of the microbatch.
        """
        self._with_grad, self._turn = False, (turn,)
        stage(self, mb)
        self._with_grad, self._turn = True, ()

    def recycle(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Keep a result for the next turn; does nothing in the last turn, which is trained."""
        if not self._with_grad:
            self.send(name, mb, shard)

    def result(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a result of the program for ``carry``; only the last turn has results."""
        if self._with_grad:
            self.send(name, mb, shard)

    def recycled(self, name: str, mb: int) -> Any:
        """The result of the turn before; zeros in the first turn."""
        return self._carrier.recycled(name, mb)

    def add_loss(self, loss: Tensor) -> None:
        """Add a part of a microbatch's loss."""
        if not self._with_grad:
            return
        share = loss * self._loss_share
        self._loss = share if self._loss is None else self._loss + share

    # --- edges ----------------------------------------------------------------------------------
    # These return None where this rank receives nothing; generated code knows where that is.

    def move(self, name: str, shard: Tensor | None) -> Any:
        """Move the value of an edge from its writers to its readers."""
        return self._carrier.move(name, shard)

    def move_back(self, name: str, grad: Tensor | None) -> Any:
        """Move the gradient of an edge from its readers to its writers."""
        return self._carrier.move_back(name, grad)

    def start_move(self, name: str, shard: Tensor | None) -> None:
        """Start ``move`` in the background."""
        self._carrier.start_move(name, shard)

    def wait_move(self, name: str) -> Any:
        """Wait for ``start_move``, and return the value."""
        return self._carrier.wait_move(name)

    def start_move_back(self, name: str, grad: Tensor | None) -> None:
        """Start ``move_back`` in the background."""
        self._carrier.start_move_back(name, grad)

    def wait_move_back(self, name: str) -> Any:
        """Wait for ``start_move_back``, and return the gradient."""
        return self._carrier.wait_move_back(name)

    def send(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a stage's result for ``carry``."""
        self._carrier.send(name, mb, shard)

    def carry(self, name: str, mb: int) -> None:
        """Start to move the result of a microbatch over an edge to another stage."""
        self._carrier.carry(name, mb)

    def receive(self, name: str, mb: int) -> Any:
        """Wait for ``carry``, and return the value."""
        return self._carrier.receive(name, mb)

    def send_grad(self, name: str, mb: int, grad: Tensor | None) -> None:
        """Leave a gradient for ``carry_back``."""
        self._carrier.send_grad(name, mb, grad)

    def carry_back(self, name: str, mb: int) -> None:
        """Start to move a gradient over an edge back to the other stage."""
        self._carrier.carry_back(name, mb)

    def receive_grad(self, name: str, mb: int) -> Any:
        """Wait for ``carry_back``, and return the gradient."""
        return self._carrier.receive_grad(name, mb)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mean(values: Sequence[Tensor]) -> Tensor:
    """The mean of scalars, in float64 if they are integers or bools; a single one is its mean."""
    if len(values) == 1:
        return values[0]
    whole = torch.stack(list(values))
    has_mean = whole.is_floating_point() or whole.is_complex()
    return (whole if has_mean else whole.double()).mean(0)
