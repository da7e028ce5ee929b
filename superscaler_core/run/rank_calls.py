"""RankCalls: the methods of a rank that its program calls, be it executed or printed."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.ops import mix
from superscaler_core.run.delay import CorrectedWeights
from superscaler_core.run.host import Host, Offloaded
from superscaler_core.run.mover import EdgeMover
from superscaler_core.run.moves import Route
from superscaler_core.run.own_samples import OwnSamples
from superscaler_core.run.ranges import instruction
from superscaler_core.run.tables import Tables, box_of
from superscaler_core.run.tape import Grads, SegmentFunction, Tape, Tensors
from superscaler_core.run.trail import Trail
from superscaler_core.run.transport import Transport
from superscaler_core.run.weights import WeightStore

P = ParamSpec("P")
T = TypeVar("T")

StageFunction = Callable[[Any, int], None]
"""Runs a stage on a rank, for a microbatch."""

_NOTHING: Mapping[str, int] = MappingProxyType({})

_SEGMENT, _EDGE, _SENT, _WEIGHTS = 2, 1, 2, 1
"""How many first arguments name what an instruction is about: a segment and its microbatch, an edge
alone or with its microbatch, weights."""


def _of(
    part: str,
    method: Callable[Concatenate[Any, P], T],
    num_named: int | None = None,
    words: str = "",
) -> Callable[Concatenate[RankCalls, P], T]:
    """A method of a part of the rank, as a method of the rank; an ``instruction`` if it names."""
    get = attrgetter(part)

    @wraps(method)
    def call(rank: RankCalls, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(get(rank), *args, **kwargs)

    return call if num_named is None else instruction(num_named, words)(call)


def _offloaded(
    words: str, *steps: Callable[[Offloaded], None]
) -> Callable[[RankCalls, SegmentFunction, int], None]:
    """Steps of the kept values of a segment to the host or back; a pass has kept none."""

    @instruction(_SEGMENT, words)
    def call(rank: RankCalls, segment: SegmentFunction, mb: int) -> None:
        for step in steps if rank._with_grad else ():
            step(rank._tape.offloaded(segment, mb))

    return call


class RankCalls:
    """What the lines of a program call on one rank.

    The tape runs segments, the mover moves tensors of edges, and the store holds the weights.
    Some methods give None where this rank receives nothing; programs know where that is.

    Args:
        tables: tables of the program.
        transport: moves tensors between ranks.
        constants: values of the model that depend on no input, on the device.
        weights: the weights.
        device: where tensors live.
        host: the place of tensors that the program swaps.
        seed: seed of dropout.

    Attributes:
        loss_grad: the gradient of each microbatch's loss.
        updates: runs the optimizers of some parameters.
        corrected: corrects the weights that backwards read, if anything does.
        trail: the instructions that the rank began last.
    """

    def __init__(
        self,
        tables: Tables,
        transport: Transport,
        constants: dict[str, Tensor],
        weights: WeightStore,
        device: torch.device,
        host: Host,
        seed: int,
    ) -> None:
        self.tables, self.weights, self.device = tables, weights, device
        self.trail = Trail()
        self._constants = constants
        self._tape = Tape(tables.recomputed, tables.offloaded, host)
        self._mover = EdgeMover(tables, transport, device)
        self._seed, self._num_steps = seed, 0
        dtype: torch.dtype = getattr(torch, tables.loss_dtype)
        num = tables.num_microbatches
        per_update = tables.microbatches_per_update or num
        shares = {n: torch.tensor(1.0 / n, dtype=dtype, device=device) for n in (num, per_update)}
        self._loss_share, self._grad_share = shares[num], shares[per_update]
        self.loss_grad = self._grad_share
        self._loss: Tensor | None = None
        self._total = torch.zeros((), dtype=dtype, device=device)
        scalar = rv.Box((), ())
        self._route_of_loss = Route(transport, tables.loss, scalar, scalar)
        self.updates: Callable[[Sequence[str]], object] = lambda _: None
        self.corrected: CorrectedWeights | None = None
        self._batch: Mapping[str, Tensor | OwnSamples] = {}
        self._states: dict[tuple[str, int, tuple[int, ...]], Tensor] = {}
        self._with_grad = True
        self._recycling_pass: tuple[int, ...] = ()

    # --- runs of stages -------------------------------------------------------------------------

    def reads(
        self, stage: StageFunction, mb: int, version: int, borrowed: Mapping[str, int] = _NOTHING
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
        self, stage: StageFunction, mb: int, version: int, borrowed: Mapping[str, int] = _NOTHING
    ) -> None:
        """Like ``reads``, for a backward, whose weights may be corrected (``DelayCorrection``)."""
        if self.corrected is None:
            self.reads(stage, mb, version, borrowed)
            return
        with self.corrected.corrected(self.weights.newest(borrowed)):
            self.reads(stage, mb, version, borrowed)

    def without_grad(self, stage: StageFunction, mb: int, recycling_pass: int) -> None:
        """Run the forward of one pass of a microbatch without gradient: only its results remain."""
        self._with_grad, self._recycling_pass = False, (recycling_pass,)
        stage(self, mb)
        self._with_grad, self._recycling_pass = True, ()

    def add_loss(self, loss: Tensor) -> None:
        """Add a part of a microbatch's loss."""
        if not self._with_grad:
            return
        share = loss * self._loss_share
        self._loss = share if self._loss is None else self._loss + share

    @instruction(0)
    def total_loss(self) -> None:
        """Sum the losses of all microbatches over all ranks."""
        total = self._route_of_loss.move(self._loss)
        assert total is not None, "every rank gets the loss"
        self._total = total

    def _rng(self, mb: int) -> int:
        return mix(self._seed, self._num_steps, mb, *self._recycling_pass)

    # --- segments; in a recycling pass they keep nothing ---------------------------------

    @instruction(_SEGMENT)
    def forward(
        self, segment: SegmentFunction, mb: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment, and keep what its backward needs (``Tape.forward``)."""
        if not self._with_grad:
            return self.compute(segment, mb, inputs, others)
        return self._tape.forward(segment, mb, self._rng(mb), inputs, others)

    @instruction(_SEGMENT)
    def compute(
        self, segment: SegmentFunction, mb: int, inputs: Tensors, others: Tensors
    ) -> Tensors:
        """Run a segment that has no backward."""
        return self._tape.compute(segment, self._rng(mb), inputs, others)

    @instruction(_SEGMENT)
    def backward(self, segment: SegmentFunction, mb: int, grads: Grads) -> Tensors:
        """The gradients of a segment's inputs, given those of its outputs."""
        return self._tape.backward(segment, mb, self._rng(mb), grads)

    @instruction(_SEGMENT)
    def backward_inputs(self, segment: SegmentFunction, mb: int, grads: Grads) -> Tensors:
        """Like ``backward``, without the gradients of weights; ``backward_weights`` adds those."""
        return self._tape.backward_inputs(segment, mb, self._rng(mb), grads)

    @instruction(_SEGMENT)
    def recompute(self, segment: SegmentFunction, mb: int) -> None:
        """Recompute a segment that kept only its inputs, before its backward."""
        self._tape.recompute(segment, mb, self._rng(mb))

    hold = _of("_tape", Tape.hold)
    backward_weights = _of("_tape", Tape.backward_weights, _SEGMENT)
    kept = _of("_tape", Tape.kept, _SENT, "resume")

    def keep(self, name: str, mb: int, values: Tensors) -> None:
        """Keep the inputs of a region for its recomputation, if there will be a backward."""
        if self._with_grad:
            self._tape.keep(name, mb, values)

    # Copies of kept values to the host and back.
    start_offload = _offloaded("start offload", Offloaded.send)
    wait_offload = _offloaded("wait offload", Offloaded.leave)
    offload = _offloaded("offload", Offloaded.send, Offloaded.leave)
    start_reload = _offloaded("start reload", Offloaded.fetch)
    wait_reload = _offloaded("wait reload", Offloaded.arrive)
    reload = _offloaded("reload", Offloaded.fetch, Offloaded.arrive)

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

    def state(self, name: str, mb: int) -> Tensor:
        """The value of a buffer for a microbatch; a recomputation gets the same value."""
        key = name, mb, self._recycling_pass
        if key not in self._states:
            self._states[key] = self._constants[name].clone()
        return self._states[key]

    def keep_state(self, name: str, value: Tensor) -> None:
        """Replace a buffer, for the microbatches that follow."""
        self._constants[name].copy_(value)

    # --- edges ----------------------------------------------------------------------------------

    move = _of("_mover", EdgeMover.move, _EDGE)
    start_move = _of("_mover", EdgeMover.start_move, _EDGE)
    wait_move = _of("_mover", EdgeMover.wait_move, _EDGE)
    move_back = _of("_mover", EdgeMover.move_back, _EDGE)
    start_move_back = _of("_mover", EdgeMover.start_move_back, _EDGE)
    wait_move_back = _of("_mover", EdgeMover.wait_move_back, _EDGE)
    send = _of("_mover", EdgeMover.send)
    p2p_send = _of("_mover", EdgeMover.p2p_send, _SENT)
    receive = _of("_mover", EdgeMover.receive, _SENT)
    send_grad = _of("_mover", EdgeMover.send_grad)
    p2p_send_back = _of("_mover", EdgeMover.p2p_send_back, _SENT)
    receive_grad = _of("_mover", EdgeMover.receive_grad, _SENT)
    recycled = _of("_mover", EdgeMover.recycled)

    def recycle(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Keep a result for the next pass; does nothing in the last pass, which is trained."""
        if not self._with_grad:
            self.send(name, mb, shard)

    def result(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a result of the program for ``p2p_send``; only the last pass has results."""
        if self._with_grad:
            self.send(name, mb, shard)

    # --- weights; started communication runs while the rank continues ---------------------------

    begin = _of("weights", WeightStore.begin, 0)
    fetch = _of("weights", WeightStore.fetch, _WEIGHTS)
    start_fetch = _of("weights", WeightStore.start_fetch, _WEIGHTS)
    wait_fetch = _of("weights", WeightStore.wait_fetch, _WEIGHTS)
    unshard = _of("weights", WeightStore.unshard, _WEIGHTS)
    start_unshard = _of("weights", WeightStore.start_unshard, _WEIGHTS)
    wait_unshard = _of("weights", WeightStore.wait_unshard, _WEIGHTS)
    reshard = _of("weights", WeightStore.drop)
    reduce = _of("weights", WeightStore.reduce, _WEIGHTS)
    start_reduce = _of("weights", WeightStore.start_reduce, _WEIGHTS)
    wait_reduce = _of("weights", WeightStore.wait_reduce, _WEIGHTS)

    def use(self, name: str) -> Tensor:
        """The copy of a weight that segments read."""
        return self.weights.copy(name)

    @instruction(_WEIGHTS)
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
        if self.corrected is not None:
            self.corrected.note(self.weights.newest(()))
