"""Doubling: trees of few rounds, for messages so small that their latency is most of their time.

In beat k a rank sends to the rank that lies 2^k further on, around the circle of all ranks, what it
has for ranks there (dissemination; Hensgen, Finkel and Manber 1988; for collectives Bruck et al.
1997). So each element reaches all ranks after ceil(log2 ranks) beats, in each of which a rank has
one partner; sums go the same ways back. Branches that lead to no reader are cut off. Ranks may pass
on what they do not need.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fractions import Fraction

import numpy as np

from rvdcomm.cost.demands import Demand
from rvdcomm.network import Wire
from rvdcomm.synthesis.cheapest import Edge, Hops, Prices, tree_of
from rvdcomm.synthesis.forest import Forest, Way, unserved


def doubling(demands: Sequence[Demand], wires: Sequence[Wire]) -> Forest | None:
    """Ways for all demands; None if some ranks reach each other over other ranks only."""
    demands = unserved(demands)
    ranks = {rank for demand in demands for rank in demand.readers.union(*demand.parts)}
    if len(ranks) < 2:
        return None
    rates = np.array([wire.link.bytes_per_sec for wire in wires])
    prices = Hops(wires, ranks).priced(1 / rates)
    if not np.isfinite(prices.hop).all():
        return None
    ways = tuple(tuple(_ways(prices, demand)) for demand in demands)
    return Forest(demands, ways, tuple(wires), pace="doubling")


def _ways(prices: Prices, demand: Demand) -> Iterable[tuple[Way, Fraction]]:
    """One way, or if there are parts to add, one for each rank that needs the sum."""
    number = {rank: i for i, rank in enumerate(prices.ranks)}
    count = len(number)
    readers = [number[r] for r in sorted(demand.readers) if not demand.is_served(r)]
    holders = [min(number[rank] for rank in held) for held in demand.parts]
    if len(holders) == 1:
        edges = circle_edges(holders[0], readers, count)
        return [((tree_of(prices, holders[0], [], edges),), Fraction(1))]
    return [
        (
            (
                tree_of(
                    prices,
                    root,
                    circle_edges(root, holders, count),
                    circle_edges(root, readers, count),
                ),
            ),
            Fraction(1, len(readers)),
        )
        for root in readers
    ]


def circle_edges(root: int, ends: Iterable[int], count: int) -> list[Edge]:
    """The edges of the tree from ``root`` around a circle of ``count`` nodes that lead to ends.

    >>> circle_edges(0, [3], 4)
    [(0, 1), (1, 3)]
    """
    needed = set()
    for end in ends:
        offset = (end - root) % count
        while offset and offset not in needed:
            needed.add(offset)
            offset -= 1 << offset.bit_length() - 1
    return [
        ((root + offset - (1 << offset.bit_length() - 1)) % count, (root + offset) % count)
        for offset in sorted(needed)
    ]
