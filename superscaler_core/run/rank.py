"""Rank: what the functions of a generated file call; one training step on one rank."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

import rvdcomm as rv
from superscaler_core.ops import mix
from superscaler_core.run.host import Host
from superscaler_core.run.moves import Wait, move, start
from superscaler_core.run.swap import Parcel, Swap, emptied
from superscaler_core.run.tables import Edge, Leg, Tables, box_of
from superscaler_core.run.transport import Transport
from superscaler_core.run.weights import WeightStore

Segment = Callable[..., tuple[Tensor, ...]]


@dataclass(frozen=True, slots=True)
class _Saved:
    """What the backward of a segment needs.

    Gradients of its results enter at ``roots``; None if it runs the forward again. Of a swapped
    segment ``parcel`` has the values, and leaves are empty (or packed, if the forward runs again).
    """

    leaves: tuple[Any, ...]
    others: tuple[Tensor, ...]
    roots: tuple[GradientEdge | None, ...] | None
    parcel: Parcel | None = None


class Rank:
    """Runs a generated file.

    Segments run under autograd on leaves of their own, so that all communication lies between
    them, forward and backward, in the order that the file says.

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
        self._swap = Swap(host)
        self.device = torch.device(device)
        self._step: Callable[[Rank], None] = module.step
        self._transport = transport
        self._constants = {name: value.to(device) for name, value in constants.items()}
        self._seed, self._num_steps = seed, 0
        loss_dtype: torch.dtype = getattr(torch, self.tables.loss_dtype)
        share = 1.0 / self.tables.num_microbatches
        self.loss_grad = torch.tensor(share, dtype=loss_dtype, device=device)
        self._batch: Mapping[str, Tensor] = {}
        self._loss: Tensor | None = None
        self._saved: dict[tuple[str, int], _Saved] = {}
        self._kept: dict[tuple[str, int], tuple[Tensor, ...]] = {}
        # By what, edge and microbatch; a microbatch that takes several turns leaves one each.
        self._mail: defaultdict[tuple[str, str, int], deque[Any]] = defaultdict(deque)
        self._has_turned: set[tuple[str, int]] = set()
        self._with_grad = True
        self._turn: tuple[int, ...] = ()
        transport.prepare([leg for leg in self._legs() if not leg.is_idle])

    def _legs(self) -> Iterable[Leg]:
        """All that are moved one by one, in the order of the tables, which is that of all ranks."""
        for edge in self.tables.edges.values():
            yield from (*edge.forward, *edge.backward)
        yield from self.tables.loss

    # --- a step ---------------------------------------------------------------------------------

    def step(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Run forward and backward of a global batch; returns the loss, the same on all ranks.

        Args:
            batch: every input, whole: ``num_microbatches`` times the captured batch along dim 0.
        """
        self._check(batch)
        self._batch = batch
        self._loss = None
        self._num_steps += 1
        self._step(self)
        assert not self._saved, "every forward had its backward"
        assert not self._kept, "every span was run again"
        # A send of which nobody waited may still run; its error must not be lost.
        for (kind, _, _), queue in self._mail.items():
            for waits in queue if kind.endswith("sent") else ():
                waits()
        self._mail.clear()
        self._has_turned.clear()
        loss = None if self._loss is None else (self._loss, rv.Box((), ()))
        total = move(self._transport, self.tables.loss, loss, rv.Box((), ()))
        assert total is not None
        return total

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
        """Bring weights to where they are read."""
        self.weights.begin()

    def end(self) -> None:
        """Take gradients to where weights are stored."""
        self.weights.end()

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

    def use(self, name: str) -> Tensor:
        """A weight's copy."""
        return self.weights.copy(name)

    def gather(self, names: Sequence[str]) -> None:
        """Fill the weights of a window."""
        self.weights.gather(names)

    def drop(self, names: Sequence[str]) -> None:
        """Free the weights of a window."""
        self.weights.drop(names)

    def reduce(self, names: Sequence[str]) -> None:
        """Reduce the gradients of a window's weights; those that were gathered are dropped."""
        self.weights.reduce(names)
        self.weights.drop(n for n in names if self.tables.weights[n].windowed == "gather")

    def _rng(self, mb: int) -> int:
        """The seed of a microbatch: the same on all ranks, and again in a recomputation."""
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
        if (name, mb) in self._has_turned:
            return self.receive(name, mb)
        self._has_turned.add((name, mb))
        edge = self.tables.edges[name]
        box = _box(edge.dst)
        return None if box is None else self._zeros(box, edge)

    def _zeros(self, box: rv.Box, edge: Edge) -> Tensor:
        dtype: torch.dtype = getattr(torch, edge.dtype)
        return torch.zeros(box.shape, dtype=dtype, device=self.device)

    # --- segments -------------------------------------------------------------------------------

    def forward(
        self, segment: Segment, mb: int, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Run a segment and keep what its backward needs.

        Args:
            segment: the function.
            mb: the microbatch.
            inputs: what its gradient is wanted of.
            others: inputs, constants and weights.
        """
        if not self._with_grad:
            return self.compute(segment, mb, inputs, others)
        name = segment.__name__
        if name in self.tables.swapped:
            return self._forward_swapped(segment, mb, inputs, others)
        if name in self.tables.recomputed:
            with torch.no_grad():
                outputs = segment(self._rng(mb), *inputs, *others)
            self._saved[name, mb] = _Saved(inputs, others, None)
            return outputs
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        # Autograd keeps what it needs of a view; a leaf it would keep as it is, which is emptied.
        outputs = segment(self._rng(mb), *(leaf.view_as(leaf) for leaf in leaves), *others)
        self._saved[name, mb] = _Saved(tuple(map(emptied, leaves)), (), _roots(outputs))
        return tuple(x.detach() for x in outputs)

    def _forward_swapped(
        self, segment: Segment, mb: int, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """As ``forward``; what the backward needs goes to the host."""
        name, parcel = segment.__name__, self._swap.parcel(others)
        if name in self.tables.recomputed:
            outputs = self.compute(segment, mb, inputs, others)
            self._saved[name, mb] = _Saved(tuple(map(parcel.pack, inputs)), others, None, parcel)
            parcel.send()
            return outputs
        leaves = tuple(x.detach().requires_grad_() for x in inputs)
        with parcel.packing():
            outputs = segment(self._rng(mb), *leaves, *others)
        self._saved[name, mb] = _Saved(tuple(map(emptied, leaves)), (), _roots(outputs), parcel)
        return tuple(x.detach() for x in outputs)

    def compute(
        self, segment: Segment, mb: int, inputs: tuple[Tensor, ...], others: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        """Run a segment that has no backward."""
        with torch.no_grad():
            return segment(self._rng(mb), *inputs, *others)

    def backward(
        self, segment: Segment, mb: int, grads: tuple[Tensor | None, ...]
    ) -> tuple[Tensor, ...]:
        """The gradients of a segment's inputs, given those of its outputs.

        Gradients of weights are added to those of their copies.
        """
        saved = self._saved.pop((segment.__name__, mb))
        self._fetch(saved, mb)
        leaves, roots = saved.leaves, saved.roots
        if roots is None:
            unpacked = leaves if saved.parcel is None else map(saved.parcel.unpack, leaves)
            leaves = tuple(x.detach().requires_grad_() for x in unpacked)
            roots = _roots(segment(self._rng(mb), *leaves, *saved.others))
        # Results that have gradients come first.
        pairs = zip(roots, grads, strict=False)
        given = [(root, grad) for root, grad in pairs if root is not None and grad is not None]
        if given:
            torch.autograd.backward([root for root, _ in given], [grad for _, grad in given])
        return tuple(x.grad if x.grad is not None else torch.zeros_like(x) for x in leaves)

    def _fetch(self, saved: _Saved, mb: int) -> None:
        """Bring what a backward needs from the host, and then what the next one will need."""
        if not self.tables.swapped:
            return
        before = (s for (_, other), s in reversed(self._saved.items()) if other == mb)
        for one in (saved, next(before, None)):
            if one is not None and one.parcel is not None:
                one.parcel.fetch()

    def keep(self, name: str, mb: int, values: tuple[Tensor, ...]) -> None:
        """Keep what is needed to run a span again, if there will be a backward."""
        if self._with_grad:
            self._kept[name, mb] = values

    def kept(self, name: str, mb: int) -> tuple[Tensor, ...]:
        """What ``keep`` kept, which is let go."""
        return self._kept.pop((name, mb))

    def add_loss(self, loss: Tensor) -> None:
        """Count a part of a microbatch's loss."""
        if not self._with_grad:
            return
        share = loss * self.loss_grad
        self._loss = share if self._loss is None else self._loss + share

    # --- inside a stage -------------------------------------------------------------------------

    def move(self, name: str, shard: Tensor | None) -> Any:
        """Take an edge's value from those who write it to those who read it."""
        edge = self.tables.edges[name]
        return move(self._transport, edge.forward, _shard(shard, edge.src), _box(edge.dst))

    def move_back(self, name: str, grad: Tensor | None) -> Any:
        """Take the gradient back."""
        edge = self.tables.edges[name]
        given = self._grad(edge, grad)
        return move(self._transport, edge.backward, given, _box(edge.src))

    def _grad(self, edge: Edge, grad: Tensor | None) -> tuple[Tensor, rv.Box] | None:
        """The gradient of what this rank read; zeros if none reached it."""
        box = _box(edge.dst)
        if box is None:
            return None
        return self._zeros(box, edge) if grad is None else grad, box

    # --- between stages -------------------------------------------------------------------------

    def send(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a stage's result for ``carry``."""
        self._mail["out", name, mb].append(shard)

    def carry(self, name: str, mb: int) -> None:
        """Let an edge to another stage take a microbatch along, while this rank goes on."""
        edge = self.tables.edges[name]
        shard = _shard(self._taken("out", name, mb), edge.src)
        waits = start(self._transport, edge.forward, shard, _box(edge.dst))
        self._mail["in" if edge.dst else "sent", name, mb].append(waits)

    def receive(self, name: str, mb: int) -> Any:
        """What ``carry`` brought."""
        return self._received("in", name, mb)

    def send_grad(self, name: str, mb: int, grad: Tensor | None) -> None:
        """Leave a gradient for ``carry_back``."""
        self._mail["grad out", name, mb].append(grad)

    def carry_back(self, name: str, mb: int) -> None:
        """Let the gradient of an edge go back to the stage that it came from."""
        edge = self.tables.edges[name]
        grad = self._grad(edge, self._taken("grad out", name, mb))
        waits = start(self._transport, edge.backward, grad, _box(edge.src))
        self._mail["grad in" if edge.src else "grad sent", name, mb].append(waits)

    def receive_grad(self, name: str, mb: int) -> Any:
        """What ``carry_back`` brought."""
        return self._received("grad in", name, mb)

    def _received(self, kind: str, name: str, mb: int) -> Tensor | None:
        waits: Wait | None = self._taken(kind, name, mb)
        assert waits is not None, "an edge is carried before its readers run"
        return waits()

    def _taken(self, kind: str, name: str, mb: int) -> Any:
        """What was left first; None if nothing was."""
        queue = self._mail[kind, name, mb]
        return queue.popleft() if queue else None


def _box(text: str | None) -> rv.Box | None:
    return None if text is None else box_of(text)


def _roots(outputs: tuple[Tensor, ...]) -> tuple[GradientEdge | None, ...]:
    """Where gradients of results enter, by which a backward starts without the results."""
    return tuple(get_gradient_edge(out) if out.requires_grad else None for out in outputs)


def _shard(tensor: Tensor | None, box: str | None) -> tuple[Tensor, rv.Box] | None:
    return None if tensor is None or box is None else (tensor, box_of(box))
