"""Pipeline: the number of slices of a program, so that near and far links work at the same time.

An exchange (one of the path) keeps the busiest port of every level busy for some seconds, and takes
as long as its busiest level; ``pipelined_secs`` is the time of slices that follow each other. More
slices have more messages. So here every slice pays the latency of every exchange, though a part of
that overlaps.
"""

from __future__ import annotations

from collections.abc import Sequence

from rvdcomm.cost import StepCost, pipelined_secs, step_cost
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.network import Links, Topology
from rvdcomm.planning.path import Path

NUM_SLICES = (1, 2, 4, 8, 16, 32)
"""The numbers of slices to choose from."""


def exchange_costs(path: Path, dtype: str, links: Links) -> list[StepCost]:
    """The cost of every exchange of a path, counted from its moves."""
    topology = links if isinstance(links, Topology) else links.nearest_levels
    return [
        step_cost(traffic, links)
        for step in path.steps
        for traffic in step.traffic(topology, ITEM_BYTES[dtype])
    ]


def best_num_slices(exchanges: Sequence[StepCost]) -> int:
    """The number of slices with the least modelled time; the smallest of equally good numbers."""
    moving = [exchange for exchange in exchanges if exchange.busy_secs]
    busy = [exchange.busy_secs for exchange in moving]
    latency = sum(exchange.latency_secs / exchange.rounds for exchange in moving)
    return min(NUM_SLICES, key=lambda k: (pipelined_secs(busy, k) + latency * k, k))
