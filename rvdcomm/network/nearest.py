"""Nearest levels: a topology that resembles a network, for searches that know levels only."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from rvdcomm.network.link import Link
from rvdcomm.network.network import Network, Node, connected
from rvdcomm.network.topology import Level, Topology

MAX_LEVELS = 4
"""Levels of what is made."""

Homes = dict[Node, Node]
"""For each node, one of the nodes of its group."""


def nearest_levels(network: Network) -> Topology:
    """Ranks, then groups that near wires connect: near by latency, or by rate if that is of no use.

    The port of a group is as fast as all wires into it, and all ports of a level are as fast as the
    slowest of them; its latency is that of the quickest wire into a group.
    """
    alone: Homes = {node: node for node in network.nodes}
    divisions = [alone, *_divisions(network, lambda link: link.alpha_secs)]
    if len(divisions) == 1:
        divisions += _divisions(network, lambda link: -link.bytes_per_sec)
    if len(divisions) > MAX_LEVELS:
        divisions = [*divisions[: MAX_LEVELS - 1], divisions[-1]]
    return Topology(tuple(_level(network, homes, depth) for depth, homes in enumerate(divisions)))


def _divisions(network: Network, far: Callable[[Link], float]) -> Iterator[Homes]:
    """What the wires below each distance connect, if it is more than ranks and less than all."""
    known = len(network.ranks)
    for limit in sorted({far(wire.link) for wire in network.wires}):
        near = connected(wire for wire in network.wires if far(wire.link) < limit)
        homes = {node: near.get(node, node) for node in network.nodes}
        count = len({homes[rank] for rank in network.ranks})
        if 1 < count < known:
            yield homes
            known = count


def _level(network: Network, homes: Homes, depth: int) -> Level:
    groups: dict[Node, list[int]] = {}
    for rank in network.ranks:
        groups.setdefault(homes[rank], []).append(rank)
    into = [
        wire
        for wire in network.wires
        if homes[wire.dst] in groups and homes[wire.src] != homes[wire.dst]
    ]
    rates = dict.fromkeys(groups, 0.0)
    for wire in into:
        rates[homes[wire.dst]] += wire.link.bytes_per_sec
    link = Link(min(wire.link.alpha_secs for wire in into), min(rates.values()))
    name = ("rank", "host")[depth] if depth < 2 else f"level{depth}"
    return Level(name, tuple(map(tuple, groups.values())), link)
