"""Routes: the wires that a message passes from one rank to another.

A message takes the route that passes the fewest other ranks; among these the one of least latency,
summed over its wires; then the one whose wires take least time for a byte, summed; then the fewest
wires; then the nodes that come first. In a tree there is only one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from rvdcomm.network.network import Network, Node, Wire, place_of

_Entry = tuple[tuple[int, float, float, int], tuple[bool, Node], int, Node]
"""(label, place of the node, last wire, node)."""


@dataclass(frozen=True, slots=True)
class Route:
    """The way of a message.

    Attributes:
        wires: their indices in ``Network.wires``, in order.
        alpha_secs: the latency: that of the slowest wire between two ranks. Where other ranks pass
            a message on, the latencies of its parts add up.
    """

    wires: tuple[int, ...]
    alpha_secs: float


def alpha_secs_along(wires: Iterable[Wire]) -> float:
    """The latency of a message that passes these wires, as ``Route.alpha_secs``."""
    total = slowest = 0.0
    for wire in wires:
        if isinstance(wire.src, int):
            total, slowest = total + slowest, 0.0
        slowest = max(slowest, wire.link.alpha_secs)
    return total + slowest


class Routes:
    """The routes of one network; those from a rank are found when they are first asked for."""

    def __init__(self, network: Network) -> None:
        self._network = network
        self._index = {(wire.src, wire.dst): i for i, wire in enumerate(network.wires)}
        self._from: dict[int, Mapping[Node, int]] = {}
        self._known: dict[tuple[int, int], Route] = {}

    def of(self, src: int, dst: int) -> Route:
        """The route between two ranks; that of a rank to itself passes no wire."""
        pair = src, dst
        if pair not in self._known:
            wires = self._up_and_down(src, dst) if self._network.above else self._found(src, dst)
            alpha_secs = alpha_secs_along(self._network.wires[i] for i in wires)
            self._known[pair] = Route(wires, alpha_secs)
        return self._known[pair]

    def _up_and_down(self, src: int, dst: int) -> tuple[int, ...]:
        """The route in a tree of levels: up to the first common switch, and down again."""
        above = self._network.above
        up, down = list[int](), list[int]()
        here: Node = src
        there: Node = dst
        while here != there:
            up.append(self._index[here, above[here]])
            down.append(self._index[above[there], there])
            here, there = above[here], above[there]
        return (*up, *reversed(down))

    def _found(self, src: int, dst: int) -> tuple[int, ...]:
        if src not in self._from:
            self._from[src] = self._tree(src)
        into, wires = self._from[src], list[int]()
        node: Node = dst
        while node != src:
            wires.append(into[node])
            node = self._network.wires[into[node]].src
        return tuple(reversed(wires))

    def _tree(self, src: int) -> Mapping[Node, int]:
        """For every node, the last wire of the route from ``src`` (Dijkstra)."""
        network, into = self._network, dict[Node, int]()
        heap: list[_Entry] = [((0, 0.0, 0.0, 0), place_of(src), -1, src)]
        done: set[Node] = set()
        while heap:
            (passed, latency, secs, count), _, last, node = heappop(heap)
            if node in done:
                continue
            done.add(node)
            if last >= 0:
                into[node] = last
            passes = passed + (isinstance(node, int) and node != src)
            for wire in network.out[node]:
                if wire.dst not in done:
                    label = (
                        passes,
                        latency + wire.link.alpha_secs,
                        secs + 1 / wire.link.bytes_per_sec,
                        count + 1,
                    )
                    entry = self._index[wire.src, wire.dst]
                    heappush(heap, (label, place_of(wire.dst), entry, wire.dst))
        return into
