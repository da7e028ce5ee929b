"""Mover: moves values along edges, and their gradients back."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

import rvdcomm as rv
from superscaler_core.run.moves import Route, Wait
from superscaler_core.run.tables import RankEdge, Tables, box_of
from superscaler_core.run.transport import Transport


class EdgeMover:
    """Moves the values that one rank writes and reads along edges.

    An edge inside a stage is one call. For an edge to another stage or pass, the writer leaves the
    value with ``send``, ``p2p_send`` moves it in the background, and ``receive`` waits for it. If a
    microbatch takes several passes, values are received in the order in which they were sent.

    Args:
        tables: tables of the rank's file.
        transport: moves tensors between ranks.
        device: where tensors live.
    """

    def __init__(self, tables: Tables, transport: Transport, device: torch.device) -> None:
        self._edges, self._device = tables.edges, device
        # In the order of the tables, which is the same on all ranks.
        self._routes: dict[tuple[str, bool], Route] = {}
        for name, edge in tables.edges.items():
            ends = _box(edge.src), _box(edge.dst)
            self._routes[name, False] = Route(transport, edge.forward, *ends)
            self._routes[name, True] = Route(transport, edge.backward, *ends[::-1])
        # Moves of an edge that were started and not waited for. With duplex, both halves of a
        # microbatch may have one; they wait in the order in which they started.
        self._moving: defaultdict[tuple[str, bool], deque[Wait]] = defaultdict(deque)
        self._mail: defaultdict[tuple[str, str, int], deque[Any]] = defaultdict(deque)
        self._num_sent: Counter[tuple[str, bool]] = Counter()
        self._num_before: Counter[tuple[str, bool]] = Counter()
        self._has_recycled: set[tuple[str, int]] = set()

    def finish(self) -> None:
        """End a step: wait for sends that nothing else waited for, so that no error is lost.

        The next step counts its passes from 0.
        """
        for (kind, _, _), queue in self._mail.items():
            for waits in queue if kind.endswith("sent") else ():
                waits()
        self._mail.clear()
        self._num_before, self._num_sent = self._num_sent, Counter()
        self._has_recycled.clear()

    def forget(self) -> None:
        """The step has failed: drop its values, and cancel the receives that were posted early."""
        self._moving.clear()
        self._mail.clear()
        self._has_recycled.clear()
        self._num_sent.clear()
        for route in self._routes.values():
            route.forget()

    # --- inside a stage -------------------------------------------------------------------------

    def move(self, name: str, shard: Tensor | None) -> Tensor | None:
        """Move the value of an edge from its writers to its readers."""
        return self._routes[name, False].move(shard)

    def move_back(self, name: str, grad: Tensor | None) -> Tensor | None:
        """Move the gradient of an edge from its readers to its writers."""
        return self._routes[name, True].move(self._grad(name, grad))

    def start_move(self, name: str, shard: Tensor | None) -> None:
        """Start ``move`` in the background."""
        self._moving[name, False].append(self._routes[name, False].start(shard))

    def wait_move(self, name: str) -> Tensor | None:
        """Wait for the first ``start_move`` not waited for yet, and return the value."""
        return self._moving[name, False].popleft()()

    def start_move_back(self, name: str, grad: Tensor | None) -> None:
        """Start ``move_back`` in the background."""
        self._moving[name, True].append(self._routes[name, True].start(self._grad(name, grad)))

    def wait_move_back(self, name: str) -> Tensor | None:
        """Wait for the first ``start_move_back`` not waited for yet, and return the gradient."""
        return self._moving[name, True].popleft()()

    def _grad(self, name: str, grad: Tensor | None) -> Tensor | None:
        """The gradient of the value that this rank read; zeros if autograd computed none."""
        box = _box(self._edges[name].dst)
        return grad if grad is not None or box is None else self._zeros(box, self._edges[name])

    def _zeros(self, box: rv.Box, edge: RankEdge) -> Tensor:
        dtype: torch.dtype = getattr(torch, edge.dtype)
        return torch.zeros(box.shape, dtype=dtype, device=self._device)

    def brought(self, names: Collection[str], mb: int) -> Tensor:
        """A result of a microbatch, which one of these edges brought."""
        name = next(name for name in names if self._mail["in", name, mb])
        value = self.receive(name, mb)
        assert value is not None, "results go to all ranks"
        return value

    # --- between stages and passes ---------------------------------------------------------------

    def send(self, name: str, mb: int, shard: Tensor | None) -> None:
        """Leave a value for ``p2p_send``."""
        self._mail["out", name, mb].append(shard)

    def p2p_send(self, name: str, mb: int) -> None:
        """Start to move the value that ``send`` left."""
        waits = self._started(name, False, self._taken("out", name, mb))
        self._mail["in" if self._edges[name].dst else "sent", name, mb].append(waits)

    def receive(self, name: str, mb: int) -> Tensor | None:
        """Wait for ``p2p_send``, and return the value."""
        return self._received("in", name, mb)

    def recycled(self, name: str, mb: int) -> Tensor | None:
        """The result of the pass before; zeros in the first pass."""
        if (name, mb) in self._has_recycled:
            return self.receive(name, mb)
        self._has_recycled.add((name, mb))
        edge = self._edges[name]
        box = _box(edge.dst)
        return None if box is None else self._zeros(box, edge)

    def send_grad(self, name: str, mb: int, grad: Tensor | None) -> None:
        """Leave a gradient for ``p2p_send_back``."""
        self._mail["grad out", name, mb].append(grad)

    def p2p_send_back(self, name: str, mb: int) -> None:
        """Start to move the gradient that ``send_grad`` left."""
        grad = self._grad(name, self._taken("grad out", name, mb))
        waits = self._started(name, True, grad)
        self._mail["grad in" if self._edges[name].src else "grad sent", name, mb].append(waits)

    def receive_grad(self, name: str, mb: int) -> Tensor | None:
        """Wait for ``p2p_send_back``, and return the gradient."""
        return self._received("grad in", name, mb)

    def _started(self, name: str, is_back: bool, shard: Tensor | None) -> Wait:
        """Start a move, and post the receives of the next one.

        With a posted receive, a message arrives while this rank computes. A message that is sent
        before its receive is posted needs two more: one to announce it and one to request it.
        """
        route = self._routes[name, is_back]
        waits = route.start(shard)
        self._num_sent[name, is_back] += 1
        # Every step has the same number of moves over an edge. The number depends on the schedule,
        # because an edge may belong to one route or pass. The first step does not know the number,
        # so it posts no early receives.
        if self._num_sent[name, is_back] < self._num_before[name, is_back]:
            route.expect()
        return waits

    def _received(self, kind: str, name: str, mb: int) -> Tensor | None:
        waits: Wait | None = self._taken(kind, name, mb)
        assert waits is not None, "an edge is sent before its readers run"
        return waits()

    def _taken(self, kind: str, name: str, mb: int) -> Any:
        """The first value left and not yet taken; None if there is none."""
        queue = self._mail[kind, name, mb]
        return queue.popleft() if queue else None


def _box(text: str | None) -> rv.Box | None:
    return None if text is None else box_of(text)
