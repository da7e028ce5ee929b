"""Rank: runs the training steps of a program on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.run.host import Host
from superscaler_core.run.moves import move_many
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.rank_calls import RankCalls
from superscaler_core.run.tables import SubTransfer, Tables, box_of
from superscaler_core.run.transport import Transport
from superscaler_core.run.weights import WeightStore


class RankCode(Protocol):
    """The program of one rank: an ``Executor`` of its instructions, or its printed file, imported.

    Attributes:
        TABLES: its data.
        step: runs one step by calling the methods of a rank.
    """

    @property
    def TABLES(self) -> Tables: ...  # noqa: N802 - as in printed files

    def step(self, rank: Any, /) -> None: ...


class Rank(RankCalls):
    """Runs steps: gives the program a batch, and the caller its loss and its results.

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
        program: RankCode | ModuleType,
        transport: Transport,
        constants: Mapping[str, Tensor],
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        host: Host | None = None,
        shares: Rank | None = None,
    ) -> None:
        tables: Tables = program.TABLES
        host = host or Host(device)
        stored = None if shares is None else shares.weights.stored
        weights = WeightStore(tables, transport, dtype, device, host, stored)
        own = {name: value.to(device) for name, value in constants.items()}
        super().__init__(tables, transport, own, weights, torch.device(device), host, seed)
        if shares is not None:
            assert shares.boxes == self.boxes, "both programs store the same"
            names = {*tables.buffers, *tables.states, *shares.tables.states}
            own |= {name: value for name, value in shares._constants.items() if name in names}
        self._step: Callable[[Rank], None] = program.step
        self._transport = transport
        self.trains = any(weight.reduce for weight in tables.weights.values())
        self.grad_scale: Callable[[], float] | None = None
        self.loss_scale = 1.0
        self.results: Mapping[str, Tensor] = {}
        self.carried: Mapping[str, OwnSamples] = {}

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
        self.trail.restart()
        scale = self.loss_scale * (1.0 if self.grad_scale is None else self.grad_scale())
        self.loss_grad = self._grad_share if scale == 1.0 else self._grad_share * scale
        self._num_steps += 1
        if self.corrected is not None:
            self.corrected.restart()
        try:
            self._step(self)
            self._tape.check_done()
            self.weights.check_done()
            self.weights.end_versions()
            self.results, self.carried = self._brought(), self._carried()
            self._mover.finish()
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
        self._mover.forget()
        self._tape.forget()
        self.weights.forget()
        self._states.clear()
        self._with_grad, self._recycling_pass = True, ()

    def _brought(self) -> dict[str, Tensor]:
        """The results of a step: microbatches joined along their samples, and scalars averaged."""
        edges: dict[tuple[str, int | None], list[str]] = {}
        for edge, result in self.tables.results.items():
            if result[0] not in self.tables.carried:
                edges.setdefault(result, []).append(edge)
        found = {}
        for (name, dim), mine in edges.items():
            values = [self._mover.brought(mine, mb) for mb in range(self.tables.num_microbatches)]
            # A single microbatch may have a result without samples.
            found[name] = torch.cat(values, dim or 0) if values[0].dim() else _mean(values)
        return found

    def _carried(self) -> dict[str, OwnSamples]:
        """What this rank keeps of results that no rank has whole, by result."""
        found = {}
        for edge, (name, dim) in self.tables.results.items():
            if name not in self.tables.carried or edge not in self.tables.edges:
                continue
            box, at = self.tables.edges[edge].dst, dim or 0
            if box is not None:
                num = self.tables.num_microbatches
                values = [self._mover.brought([edge], mb) for mb in range(num)]
                lo, hi = box_of(box).lo, box_of(box).hi
                whole = rv.Box((*lo[:at], 0, *lo[at:]), (*hi[:at], num, *hi[at:]))
                found[name] = OwnSamples(torch.stack(values, at), whole, at)
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
            ValueError: an input has another shape or dtype.
        """
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

    @property
    def changing(self) -> Mapping[str, Tensor]:
        """The buffers that a step may replace the values of."""
        names = {*self.tables.buffers, *self.tables.states}
        return {name: self._constants[name] for name in names if name in self._constants}

    def share_states(self) -> None:
        """Bring buffers that steps replaced to all ranks; collective."""
        states = self.tables.states
        moves = {
            name: (sub_transfers, self._held(name, sub_transfers))
            for name, sub_transfers in states.items()
        }
        for name, _, value in move_many(self._transport, moves):
            self._constants[name].copy_(value)

    def _held(
        self, name: str, sub_transfers: Sequence[SubTransfer]
    ) -> tuple[Tensor, rv.Box] | None:
        value = self._constants[name]
        is_held = any(
            self.tables.rank in sub_transfer.layouts[0].ranks for sub_transfer in sub_transfers
        )
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


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _mean(values: Sequence[Tensor]) -> Tensor:
    """The mean of scalars, in float64 if they are integers or bools; a single one is its mean."""
    if len(values) == 1:
        return values[0]
    whole = torch.stack(list(values))
    has_mean = whole.is_floating_point() or whole.is_complex()
    return (whole if has_mean else whole.double()).mean(0)
