"""Rank: what the functions of a generated file call; one training step on one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.ops import mix
from superscaler_core.run.carrier import Carrier
from superscaler_core.run.host import Host
from superscaler_core.run.segment_runner import SegmentRunner
from superscaler_core.run.tables import Tables, box_of
from superscaler_core.run.tape import Tape
from superscaler_core.run.transport import Transport
from superscaler_core.run.way import Way
from superscaler_core.run.weights import WeightStore


class Rank(SegmentRunner):
    """Runs a generated file.

    It hands on what the file says to those who do it: the tape runs segments, the carrier moves
    what edges take along, the store has the weights.

    Args:
        module: the generated file, imported.
        transport: moves tensors between ranks.
        constants: values of the model that depend on no input.
        seed: of dropout.
        dtype: of stored parameters; the model's if None.
        device: where tensors live.
        host: where those live that the program stores on the host, or swaps.
    """

    def __init__(
        self,
        module: ModuleType,
        transport: Transport,
        constants: Mapping[str, Tensor],
        *,
        seed: int = 0,
        dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        host: Host | None = None,
    ) -> None:
        self.tables: Tables = module.TABLES
        host = host or Host(device)
        self.weights = WeightStore(self.tables, transport, dtype, device, host)
        self.device = torch.device(device)
        super().__init__(Tape(self.tables.recomputed, self.tables.swapped, host))
        self._carrier = Carrier(self.tables, transport, self.device)
        self._step: Callable[[Rank], None] = module.step
        self._transport = transport
        self._constants = {name: value.to(device) for name, value in constants.items()}
        self._seed, self._num_steps = seed, 0
        loss_dtype: torch.dtype = getattr(torch, self.tables.loss_dtype)
        share = 1.0 / self.tables.num_microbatches
        self.loss_grad = torch.tensor(share, dtype=loss_dtype, device=device)
        self._batch: Mapping[str, Tensor] = {}
        self._loss: Tensor | None = None
        self._total = torch.zeros((), dtype=loss_dtype, device=device)
        self._turn: tuple[int, ...] = ()
        self.updates: Callable[[Sequence[str]], object] = lambda _: None
        scalar = rv.Box((), ())
        self._way_of_loss = Way(transport, self.tables.loss, scalar, scalar)

    # --- a step ---------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run forward and backward of a global batch; returns the loss, the same on all ranks.

        Args:
            batch: every input, whole: ``num_microbatches`` times the captured batch along dim 0.
        """
        self._check(batch)
        self.weights.check_given()
        self._batch = batch
        self._loss = None
        self._num_steps += 1
        try:
            self._step(self)
        except BaseException:
            self._carrier.forget()
            raise
        self._tape.check_done()
        self.weights.check_done()
        self._carrier.finish()
        return self._total

    def _check(self, batch: Mapping[str, Tensor]) -> None:
        for name, (shape, dtype) in self.tables.inputs.items():
            want = (shape[0] * self.tables.num_microbatches, *shape[1:]) if shape else ()
            given = batch.get(name)
            if given is None or tuple(given.shape) != want:
                got = "nothing" if given is None else list(given.shape)
                raise ValueError(
                    f"input {name!r} got {got}; a step takes {list(want)} {dtype}: "
                    f"{self.tables.num_microbatches} microbatches of {list(shape)} along dim 0."
                )

    def begin(self) -> None:
        """Copy weights to where they are read on this rank itself."""
        self.weights.begin()

    def update(self, names: Sequence[str]) -> None:
        """Leave gradients of parameters where optimizers look, and let who is to update them.

        That is the caller, after the step, if ``updates`` does nothing.
        """
        self.weights.settle(names)
        self.updates(names)

    def total_loss(self) -> None:
        """Add up the losses of all microbatches, on all ranks."""
        total = self._way_of_loss.move(self._loss)
        assert total is not None, "every rank gets the loss"
        self._total = total

    # --- what segments are given ----------------------------------------------------------------

    def input(self, name: str, mb: int, box: str) -> Tensor:
        """This rank's box of a microbatch's input."""
        shape, _ = self.tables.inputs[name]
        whole = self._batch[name]
        part = whole[mb * shape[0] : (mb + 1) * shape[0]] if shape else whole
        cut = part[box_of(box).slices_within(rv.Box.of_shape(shape))]
        return cut.to(self.device)

    def constant(self, name: str) -> Tensor:
        """A value that depends on no input."""
        return self._constants[name]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of all that is in the model's ``state_dict``, by name."""
        parameters = {name: entry.shape for name, entry in self.tables.parameters.items()}
        aliases = {alias: parameters[name] for alias, name in self.tables.aliases.items()}
        buffers = {name: tuple(self._constants[name].shape) for name in self.tables.buffers}
        return {**parameters, **aliases, **buffers}

    def buffer_faults(self, state: Mapping[str, Tensor]) -> list[str]:
        """Why buffers cannot have the values in ``state``."""
        return [
            f"buffer {name} has other values, and the capture computed constants of it: capture "
            "the model with the values that it is to have"
            for name, is_folded in self.tables.buffers.items()
            if is_folded and name in state and state[name].shape == self._constants[name].shape
            and not torch.equal(state[name].to(self._constants[name]), self._constants[name])
        ]  # fmt: skip

    def use(self, name: str) -> Tensor:
        """A weight's copy."""
        return self.weights.copy(name)

    # --- weights that come, and gradients that go; what is started runs while the rank goes on ----

    def fetch(self, names: Sequence[str]) -> None:
        """Bring weights to where they are read, for the whole step."""
        self.weights.fetch(names)

    def start_fetch(self, names: Sequence[str]) -> None:
        """Begin to."""
        self.weights.start_fetch(names)

    def wait_fetch(self, names: Sequence[str]) -> None:
        """Wait until they are there."""
        self.weights.wait_fetch(names)

    def gather(self, names: Sequence[str]) -> None:
        """Fill the weights of a window."""
        self.weights.gather(names)

    def start_gather(self, names: Sequence[str]) -> None:
        """Begin to."""
        self.weights.start_gather(names)

    def wait_gather(self, names: Sequence[str]) -> None:
        """Wait until they are there."""
        self.weights.wait_gather(names)

    def drop(self, names: Sequence[str]) -> None:
        """Free the weights of a window."""
        self.weights.drop(names)

    def reduce(self, names: Sequence[str]) -> None:
        """Reduce gradients of weights; weights that were gathered are dropped."""
        self.weights.reduce(names)
        self._drop_gathered(names)

    def start_reduce(self, names: Sequence[str]) -> None:
        """Begin to; weights that were gathered are dropped."""
        self.weights.start_reduce(names)
        self._drop_gathered(names)

    def wait_reduce(self, names: Sequence[str]) -> None:
        """Wait until gradients are where weights are stored."""
        self.weights.wait_reduce(names)

    def _drop_gathered(self, names: Sequence[str]) -> None:
        self.weights.drop(n for n in names if self.tables.weights[n].windowed == "gather")

    def _rng(self, mb: int) -> int:
        return mix(self._seed, self._num_steps, mb, *self._turn)

    # --- turns ----------------------------------------------------------------------------------

    def without_grad(self, stage: Callable[[Rank, int], None], mb: int, turn: int) -> None:
        """Run a stage forward for what it makes of a microbatch alone: nothing is kept of it.

        Args:
            stage: the function of its forward.
            mb: the microbatch.
            turn: which forward without gradient of the microbatch this is.
        """
        self._with_grad, self._turn = False, (turn,)
        stage(self, mb)
        self._with_grad, self._turn = True, ()

    def recycle(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a result for the next turn; the turn that is trained is the last."""
        if not self._with_grad:
            self.send(name, mb, shard)

    def recycled(self, name: str, mb: int) -> Any:
        """What the turn before made; zeros in the first."""
        return self._carrier.recycled(name, mb)

    def add_loss(self, loss: Tensor) -> None:
        """Count a part of a microbatch's loss."""
        if not self._with_grad:
            return
        share = loss * self.loss_grad
        self._loss = share if self._loss is None else self._loss + share

    # --- edges ----------------------------------------------------------------------------------
    # What they return is None where this rank has no end of an edge; generated code knows.

    def move(self, name: str, shard: Tensor | None) -> Any:
        """Take an edge's value from those who write it to those who read it."""
        return self._carrier.move(name, shard)

    def move_back(self, name: str, grad: Tensor | None) -> Any:
        """Take the gradient back."""
        return self._carrier.move_back(name, grad)

    def start_move(self, name: str, shard: Tensor | None) -> None:
        """Let an edge's value go while the rank goes on."""
        self._carrier.start_move(name, shard)

    def wait_move(self, name: str) -> Any:
        """What ``start_move`` brought."""
        return self._carrier.wait_move(name)

    def start_move_back(self, name: str, grad: Tensor | None) -> None:
        """Let the gradient go back while the rank goes on."""
        self._carrier.start_move_back(name, grad)

    def wait_move_back(self, name: str) -> Any:
        """What ``start_move_back`` brought."""
        return self._carrier.wait_move_back(name)

    def send(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a stage's result for ``carry``."""
        self._carrier.send(name, mb, shard)

    def carry(self, name: str, mb: int) -> None:
        """Let an edge to another stage take a microbatch along, while this rank goes on."""
        self._carrier.carry(name, mb)

    def receive(self, name: str, mb: int) -> Any:
        """What ``carry`` brought."""
        return self._carrier.receive(name, mb)

    def send_grad(self, name: str, mb: int, grad: Tensor | None) -> None:
        """Leave a gradient for ``carry_back``."""
        self._carrier.send_grad(name, mb, grad)

    def carry_back(self, name: str, mb: int) -> None:
        """Let the gradient of an edge go back to the stage that it came from."""
        self._carrier.carry_back(name, mb)

    def receive_grad(self, name: str, mb: int) -> Any:
        """What ``carry_back`` brought."""
        return self._carrier.receive_grad(name, mb)
