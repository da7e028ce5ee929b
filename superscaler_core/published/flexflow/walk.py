"""Walk: the current assignment of a local search, which changes a few nodes at a time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import inf

import numpy as np

from superscaler_core.space.space import Array, Assignment, Solution, Space

Move = Mapping[int, int]
"""New choices of some nodes, by the number of the node."""


class Walk:
    """An assignment with its price; a move computes only the terms of the moved nodes anew.

    The price is the time of a step plus a price for every byte above a device's memory, so that a
    search can start where nothing fits. An impossible choice, or pair of choices, costs more than
    all possible ones together.

    Law (tests/superscaler_core/space): after any moves, the price is that of a new walk
    that starts at the same assignment; if the assignment fits, it is ``Space.secs``.

    Complexity: a move reads the edges at its nodes; with a memory limit it also takes the maximum
    of all nodes' work memory.

    Args:
        space: the space that is searched.
        start: the first assignment.
        secs_per_excess_byte: price of a byte above a device's memory.
    """

    def __init__(
        self, space: Space, start: Sequence[int], secs_per_excess_byte: float = 1e-9
    ) -> None:
        self.space = space
        self._secs_per_byte = secs_per_excess_byte if space.memory_bytes < inf else 0.0
        # Reading one number from an array takes ten times as long as from a list.
        self._most = most = _more_than_all(space)
        self._found: Assignment | None = None
        self._found_price = self.price = inf
        self._node_secs: list[list[float]] = [_finite(x, most).tolist() for x in space.node_secs]
        self._edge_secs: list[list[list[float]]] = [
            _finite(x, most).tolist() for x in space.edge_secs
        ]
        self._ends = [(edge.src, edge.dst) for edge in space.edges]
        self._held: list[list[float]] = [size.tolist() for size in space.held_bytes]
        self._works: list[list[float]] = [node.work_bytes.tolist() for node in space.nodes]
        self.jump(start)

    def jump(self, to: Sequence[int]) -> None:
        """Go to any assignment; all sums are computed anew, so rounding errors vanish."""
        self.assignment = [int(choice) for choice in to]
        pairs = range(len(self._held)), self.assignment
        self._secs = self._terms(range(len(self._held)), range(len(self._ends)))
        self._held_bytes = sum(self._held[node][i] for node, i in zip(*pairs, strict=True))
        self._work = [self._works[node][i] for node, i in zip(*pairs, strict=True)]
        self._arrive()

    @property
    def fits(self) -> bool:
        """As ``Space.fits``, up to rounding."""
        held = self._held_bytes + max(self._work)
        return self._secs < self._most and held <= self.space.memory_bytes

    def solution(self, planner: str) -> Solution:
        """The best of the visited assignments that fit.

        Raises:
            PlanError: no visited assignment fits; the message names the planner.
        """
        if self._found is None:
            raise self.space.none_fits(planner)
        return self.space.solution(self._found)

    def secs_of(self, nodes: Iterable[int]) -> float:
        """Seconds of a step that some nodes and their edges take."""
        chosen = set(nodes)
        return self._terms(chosen, {edge for node in chosen for edge in self.space.edges_of[node]})

    def move(self, to: Move) -> float:
        """Make a move; return by how many seconds the price rises. ``back`` undoes the move."""
        before = self.price
        self._undo = self._secs, self._held_bytes, before, {i: self.assignment[i] for i in to}
        edges_of = self.space.edges_of
        edges = {number for node in to for number in edges_of[node]}
        self._secs -= self._terms(to, edges)
        self._set(to)
        self._secs += self._terms(to, edges)
        self._arrive()
        return self.price - before

    def back(self) -> None:
        """Undo the last move."""
        secs, held, price, choices = self._undo
        self._set(choices)
        self._secs, self._held_bytes, self.price = secs, held, price

    def _set(self, to: Move) -> None:
        for node, choice in to.items():
            self._held_bytes += self._held[node][choice] - self._held[node][self.assignment[node]]
            self._work[node] = self._works[node][choice]
            self.assignment[node] = choice

    def _terms(self, nodes: Iterable[int], edges: Iterable[int]) -> float:
        """Seconds of a step that these nodes and edges take."""
        chosen, found = self.assignment, 0.0
        for node in nodes:
            found += self._node_secs[node][chosen[node]]
        for edge in edges:
            src, dst = self._ends[edge]
            found += self._edge_secs[edge][chosen[src]][chosen[dst]]
        return found

    def _arrive(self) -> None:
        self.price = self._price()
        if self.price < self._found_price and self.fits:
            self._found, self._found_price = tuple(self.assignment), self.price

    def _price(self) -> float:
        if not self._secs_per_byte:
            return self._secs
        excess = self._held_bytes + max(self._work) - self.space.memory_bytes
        return self._secs + self._secs_per_byte * max(0.0, excess)


def fastest_alone(space: Space) -> tuple[int, ...]:
    """For each node the choice of the least time, counting edges to the nodes before it."""
    chosen: list[int] = []
    for number, secs in enumerate(space.node_secs):
        total = secs.copy()
        for edge_number in space.edges_of[number]:
            edge, between = space.edges[edge_number], space.edge_secs[edge_number]
            if edge.src == edge.dst:
                total += np.diagonal(between)
            elif edge.src < number and edge.dst == number:
                total += between[chosen[edge.src]]
            elif edge.dst < number and edge.src == number:
                total += between[:, chosen[edge.dst]]
        chosen.append(int(np.argmin(total)))
    return tuple(chosen)


def _more_than_all(space: Space) -> float:
    """A time, in seconds, that is longer than that of any possible assignment."""
    every = (*space.node_secs, *space.edge_secs)
    return 1.0 + sum(float(np.max(secs, where=secs < inf, initial=0.0)) for secs in every)


def _finite(secs: Array, most: float) -> Array:
    return np.where(secs < inf, secs, most)
