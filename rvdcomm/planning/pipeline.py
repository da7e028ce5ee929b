"""Pipeline: the number of slices of a program, so that near and far links work at the same time.

Model (a heuristic): a exchange (one exchange of the path) keeps the busiest port of every level
busy for some seconds, and takes as long as its busiest level. With one slice, the time is the sum
over exchanges. With k slices all levels work at the same time, except while the first slice enters
and the last one leaves the pipeline: this costs 1 / k of the time that does not overlap. The
latency of every exchange is paid k times.
"""

from __future__ import annotations

from rvdcomm.cost import PortSecs, busiest_bytes, farthest_level
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.network import Topology
from rvdcomm.planning.path import Path

NUM_SLICES = (1, 2, 4, 8, 16, 32)
"""The numbers of slices to choose from."""


def best_num_slices(path: Path, dtype: str, topology: Topology) -> int:
    """The number of slices with the least modelled time; the smallest of equally good numbers."""
    ports = PortSecs.of(topology)
    traffic = [
        step_exchange
        for step in path.steps
        for step_exchange in step.traffic(topology, ITEM_BYTES[dtype])
    ]
    port_bytes = [busiest_bytes(step_exchange, topology) for step_exchange in traffic]
    busy = [ports.busy(of_exchange) for of_exchange in port_bytes]
    crossed = [
        level for of_exchange in port_bytes if (level := farthest_level(of_exchange)) is not None
    ]
    latency = sum(ports.a_round[level] for level in crossed)
    return min(NUM_SLICES, key=lambda k: (pipelined_secs(busy, latency, k), k))


def pipelined_secs(busy: list[list[float]], latency_secs: float, num_slices: int) -> float:
    """Modelled seconds of all exchanges in ``num_slices`` slices; ``busy`` has seconds by exchange
    and level.

    >>> pipelined_secs([[4.0, 0.0], [1.0, 6.0]], 0.1, 1)
    10.1
    >>> pipelined_secs([[4.0, 0.0], [1.0, 6.0]], 0.1, 4)
    7.4
    """
    in_turn = sum(max(of_exchange) for of_exchange in busy)
    at_once = max((sum(of_level) for of_level in zip(*busy, strict=True)), default=0.0)
    return at_once + (in_turn - at_once) / num_slices + latency_secs * num_slices
