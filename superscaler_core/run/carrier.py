"""Carrier: values on the way along edges, and their gradients on the way back."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from typing import Any

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.tables import RankEdge, Tables, box_of
from superscaler_core.run.transport import Transport
from superscaler_core.run.way import Wait, Way


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
        self._edges, self._device = tables.edges, device
        # In the order of the tables, which is that of all ranks.
        self._ways: dict[tuple[str, bool], Way] = {}
        for name, edge in tables.edges.items():
            ends = _box(edge.src), _box(edge.dst)
            self._ways[name, False] = Way(transport, edge.forward, *ends)
            self._ways[name, True] = Way(transport, edge.backward, *ends[::-1])
        self._moving: dict[tuple[str, bool], Wait] = {}
        self._mail: defaultdict[tuple[str, str, int], deque[Any]] = defaultdict(deque)
        self._num_carried: Counter[tuple[str, bool]] = Counter()
        self._num_before: Counter[tuple[str, bool]] = Counter()
        self._has_turned: set[tuple[str, int]] = set()

    def finish(self) -> None:
        """End a step: a send of which nobody waited may still run, and its error must not be lost.

        Turns begin anew.
        """
        for (kind, _, _), queue in self._mail.items():
            for waits in queue if kind.endswith("sent") else ():
                waits()
        self._mail.clear()
        self._num_before, self._num_carried = self._num_carried, Counter()
        self._has_turned.clear()

    def forget(self) -> None:
        """The step has failed: what is expected will not be received."""
        self._num_carried.clear()
        for way in self._ways.values():
            way.forget()

    # --- inside a stage -------------------------------------------------------------------------

    def move(self, name: str, shard: Tensor | None) -> Tensor | None:
        """Take an edge's value from those who write it to those who read it."""
        return self._ways[name, False].move(shard)

    def move_back(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Take the gradient back."""
        return self._ways[name, True].move(self._grad(name, grad))

    def start_move(self, name: str, shard: Tensor | None) -> None:
        """Let it go while the rank goes on."""
        self._moving[name, False] = self._ways[name, False].start(shard)

    def wait_move(self, name: str) -> Tensor | None:
        """What ``start_move`` brought."""
        return self._moving.pop((name, False))()

    def start_move_back(self, name: str, grad: Tensor | None) -> None:
        """Let the gradient go back while the rank goes on."""
        self._moving[name, True] = self._ways[name, True].start(self._grad(name, grad))

    def wait_move_back(self, name: str) -> Tensor | None:
        """What ``start_move_back`` brought."""
        return self._moving.pop((name, True))()

    def _grad(self, name: str, grad: Tensor | None) -> Tensor | None:
        """The gradient of what this rank read; zeros if none reached it."""
        box = _box(self._edges[name].dst)
        return grad if grad is not None or box is None else self._zeros(box, self._edges[name])

    def _zeros(self, box: rv.Box, edge: RankEdge) -> Tensor:
        dtype: torch.dtype = getattr(torch, edge.dtype)
        return torch.zeros(box.shape, dtype=dtype, device=self._device)

    # --- between stages and turns ---------------------------------------------------------------

    def send(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a value for ``carry``."""
        self._mail["out", name, mb].append(shard)

    def carry(self, name: str, mb: int) -> None:
        """Let a value go."""
        waits = self._started(name, False, self._taken("out", name, mb))
        self._mail["in" if self._edges[name].dst else "sent", name, mb].append(waits)

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
        grad = self._grad(name, self._taken("grad out", name, mb))
        waits = self._started(name, True, grad)
        self._mail["grad in" if self._edges[name].src else "grad sent", name, mb].append(waits)

    def receive_grad(self, name: str, mb: int) -> Tensor | None:
        """What ``carry_back`` brought."""
        return self._received("grad in", name, mb)

    def _started(self, name: str, is_back: bool, shard: Tensor | None) -> Wait:
        """Let something go, or come; what comes after it is expected.

        So messages arrive while this rank computes: a message that is sent before its receiver
        expects it takes another two, one to announce it and one to ask for it.
        """
        way = self._ways[name, is_back]
        waits = way.start(shard)
        self._num_carried[name, is_back] += 1
        # All steps carry alike. How often depends on the schedule: an edge may be of one route, or
        # of one turn, of the model; so the first step expects nothing.
        if self._num_carried[name, is_back] < self._num_before[name, is_back]:
            way.expect()
        return waits

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
