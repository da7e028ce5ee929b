"""Pipeline: how many slices a program is cut into, so that near and far transfers overlap.

Model: level L is busy for ``busy[leg][L]`` seconds in a leg, and a leg takes as long as its busiest
level. One after another the legs take the sum of that. In k slices all levels work at once, but for
the time in which the first slice comes in and the last one goes out, which is a k-th of what does
not overlap; and every leg's latency is paid k times.
"""

from __future__ import annotations

from collections.abc import Iterable

from rvdcomm.layout import ITEM_BYTES, Topology
from rvdcomm.planning.exchange import Move
from rvdcomm.planning.path import Path

NUM_SLICES = (1, 2, 4, 8, 16, 32)
"""Numbers to choose from."""


def best_num_slices(path: Path, dtype: str, topology: Topology) -> int:
    """The number of slices that the cost model likes best; fewer where it makes no difference."""
    legs = [moves for step in path.steps for moves in step.moves(topology)]
    busy = [_busy_secs(moves, ITEM_BYTES[dtype], topology) for moves in legs]
    latency = sum(
        topology.levels[max(level for level, secs in enumerate(of_leg) if secs)].link.alpha_secs
        for of_leg in busy
        if any(of_leg)
    )
    return min(NUM_SLICES, key=lambda k: (pipelined_secs(busy, latency, k), k))


def pipelined_secs(busy: list[list[float]], latency_secs: float, num_slices: int) -> float:
    """Modelled time of legs in so many slices.

    >>> pipelined_secs([[4.0, 0.0], [1.0, 6.0]], 0.1, 1)
    10.1
    >>> pipelined_secs([[4.0, 0.0], [1.0, 6.0]], 0.1, 4)
    7.4
    """
    in_turn = sum(max(of_leg) for of_leg in busy)
    at_once = max((sum(of_level) for of_level in zip(*busy, strict=True)), default=0.0)
    return at_once + (in_turn - at_once) / num_slices + latency_secs * num_slices


def _busy_secs(moves: Iterable[Move], item_bytes: int, topology: Topology) -> list[float]:
    """Seconds for which the busiest port of every level is busy."""
    ports: list[dict[tuple[int, str], int]] = [{} for _ in topology.levels]
    for move in moves:
        num_bytes = move.box.num_elements * item_bytes
        for level, home in enumerate(topology.homes):
            a, b = home[move.src_rank], home[move.dst_rank]
            if a != b:
                for port in ((a, "out"), (b, "in")):
                    ports[level][port] = ports[level].get(port, 0) + num_bytes
    return [
        max(port.values(), default=0) / level.link.bytes_per_sec
        for port, level in zip(ports, topology.levels, strict=True)
    ]
