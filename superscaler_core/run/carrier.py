"""Carrier: values on the way along edges, and their gradients on the way back."""

from __future__ import annotations

from collections import defaultdict, deque
from typing import Any

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.moves import Shard, Wait, move, start
from superscaler_core.run.tables import RankEdge, Tables, box_of
from superscaler_core.run.transport import Transport


class Carrier:
    """Moves what one rank writes and reads along edges.

    An edge inside a stage is one call. What goes to another stage or turn is left by those who
    write it, carried while the rank goes on, and waited for where it is read; of a microbatch that
    takes several turns, whatever is left first is read first.

    Args:
        tables: of the rank's file.
        transport: between ranks.
        device: where tensors live.
    """

    def __init__(self, tables: Tables, transport: Transport, device: torch.device) -> None:
        self._edges, self._transport, self._device = tables.edges, transport, device
        self._mail: defaultdict[tuple[str, str, int], deque[Any]] = defaultdict(deque)
        self._has_turned: set[tuple[str, int]] = set()

    def finish(self) -> None:
        """End a step: a send of which nobody waited may still run, and its error must not be lost.

        Turns begin anew.
        """
        for (kind, _, _), queue in self._mail.items():
            for waits in queue if kind.endswith("sent") else ():
                waits()
        self._mail.clear()
        self._has_turned.clear()

    # --- inside a stage -------------------------------------------------------------------------

    def move(self, name: str, shard: Tensor | None) -> Tensor | None:
        """Take an edge's value from those who write it to those who read it."""
        edge = self._edges[name]
        return move(self._transport, edge.forward, _shard(shard, edge.src), _box(edge.dst))

    def move_back(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Take the gradient back."""
        edge = self._edges[name]
        return move(self._transport, edge.backward, self._grad(edge, grad), _box(edge.src))

    def _grad(self, edge: RankEdge, grad: Tensor | None) -> Shard | None:
        """The gradient of what this rank read; zeros if none reached it."""
        box = _box(edge.dst)
        if box is None:
            return None
        return self._zeros(box, edge) if grad is None else grad, box

    def _zeros(self, box: rv.Box, edge: RankEdge) -> Tensor:
        dtype: torch.dtype = getattr(torch, edge.dtype)
        return torch.zeros(box.shape, dtype=dtype, device=self._device)

    # --- between stages and turns ---------------------------------------------------------------

    def send(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a value for ``carry``."""
        self._mail["out", name, mb].append(shard)

    def carry(self, name: str, mb: int) -> None:
        """Let a value go."""
        edge = self._edges[name]
        shard = _shard(self._taken("out", name, mb), edge.src)
        waits = start(self._transport, edge.forward, shard, _box(edge.dst))
        self._mail["in" if edge.dst else "sent", name, mb].append(waits)

    def receive(self, name: str, mb: int) -> Tensor | None:
        """What ``carry`` brought."""
        return self._received("in", name, mb)

    def recycled(self, name: str, mb: int) -> Tensor | None:
        """What the turn before made; zeros in the first."""
        if (name, mb) in self._has_turned:
            return self.receive(name, mb)
        self._has_turned.add((name, mb))
        edge = self._edges[name]
        box = _box(edge.dst)
        return None if box is None else self._zeros(box, edge)

    def send_grad(self, name: str, mb: int, grad: Tensor | None) -> None:
        """Leave a gradient for ``carry_back``."""
        self._mail["grad out", name, mb].append(grad)

    def carry_back(self, name: str, mb: int) -> None:
        """Let a gradient go."""
        edge = self._edges[name]
        grad = self._grad(edge, self._taken("grad out", name, mb))
        waits = start(self._transport, edge.backward, grad, _box(edge.src))
        self._mail["grad in" if edge.src else "grad sent", name, mb].append(waits)

    def receive_grad(self, name: str, mb: int) -> Tensor | None:
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


def _shard(tensor: Tensor | None, box: str | None) -> Shard | None:
    return None if tensor is None or box is None else (tensor, box_of(box))
