"""Pipeline: the number of slices of a program, so that near and far links work at the same time.

Model (a heuristic): a exchange (one exchange of the path) keeps the busiest port of every level
busy for some seconds, and takes as long as its busiest level. With one slice, the time is the sum
over exchanges. With k slices all levels work at the same time, except while the first slice enters
and the last one leaves the pipeline: this costs 1 / k of the time that does not overlap. The
latency of every exchange is paid k times.
"""

from __future__ import annotations

from rvdcomm.cost import busy_secs
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.network import Links, Topology
from rvdcomm.planning.path import Path

NUM_SLICES = (1, 2, 4, 8, 16, 32)
"""The numbers of slices to choose from."""


def best_num_slices(path: Path, dtype: str, links: Links) -> int:
    """The number of slices with the least modelled time; the smallest of equally good numbers."""
    topology = links if isinstance(links, Topology) else links.nearest_levels
    exchanges = [
        busy_secs(traffic, links)
        for step in path.steps
        for traffic in step.traffic(topology, ITEM_BYTES[dtype])
    ]
    busy, latencies = [secs for secs, _ in exchanges], [latency for _, latency in exchanges]
    return min(NUM_SLICES, key=lambda k: (pipelined_secs(busy, sum(latencies), k), k))


def pipelined_secs(busy: list[list[float]], latency_secs: float, num_slices: int) -> float:
    """Modelled seconds of all exchanges in ``num_slices`` slices; ``busy`` has seconds by exchange
    and level, or by exchange and wire.

    >>> pipelined_secs([[4.0, 0.0], [1.0, 6.0]], 0.1, 1)
    10.1
    >>> pipelined_secs([[4.0, 0.0], [1.0, 6.0]], 0.1, 4)
    7.4
    """
    in_turn = sum(max(of_exchange) for of_exchange in busy)
    at_once = max((sum(of_level) for of_level in zip(*busy, strict=True)), default=0.0)
    return at_once + (in_turn - at_once) / num_slices + latency_secs * num_slices
