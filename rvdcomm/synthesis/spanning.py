"""Spanning: trees of few rounds where a rank reaches only some of the others directly.

From every rank one tree leads to all: in each round every rank of it takes in the next rank around
the circle that it reaches and that is not in it yet; where all ranks reach each other, these are
the trees of ``doubling``. What a rank has for others goes along its tree, so that ranks pass on
what they got, in messages that many elements share. Sums go the same ways back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rvdcomm.cost.demands import Demand
from rvdcomm.network import Wire
from rvdcomm.synthesis.cheapest import Edge, Hops, Prices, pruned, tree_of, trees_from
from rvdcomm.synthesis.forest import Forest, Tree, Way, unserved


def spanning(demands: Sequence[Demand], wires: Sequence[Wire], one_root: bool) -> Forest | None:
    """Ways for all demands; None if some rank cannot reach another.

    With ``one_root`` a sum is made at one of its readers and goes on to the others; else each
    reader makes a share.
    """
    demands = unserved(demands)
    ranks = {rank for demand in demands for rank in demand.readers.union(*demand.parts)}
    if len(ranks) < 2:
        return None
    rates = np.array([wire.link.bytes_per_sec for wire in wires])
    trees = _Trees(Hops(wires, ranks).priced(1 / rates))
    if not trees.reach_all:
        return None
    ways = tuple(tuple(trees.ways(demand, one_root)) for demand in demands)
    return Forest(demands, ways, tuple(wires), pace="in turn")


@dataclass
class _Trees:
    """A tree from every rank to all, and one from all."""

    prices: Prices

    def __post_init__(self) -> None:
        self.number = {rank: i for i, rank in enumerate(self.prices.ranks)}
        self.used: Counter[int] = Counter()

    @cached_property
    def reaches(self) -> NDArray[np.bool_]:
        """[src, dst]: whether a rank reaches another directly."""
        return np.isfinite(self.prices.hop) & ~np.eye(len(self.number), dtype=np.bool_)

    @cached_property
    def ahead(self) -> list[tuple[list[Edge], list[int]]]:
        """For every root: the edges of a tree to all, and the round in which each is reached."""
        return [_tree(self.reaches, [root]) for root in self.number.values()]

    @cached_property
    def back(self) -> list[tuple[list[Edge], list[int]]]:
        """The same against the direction of hops."""
        return [_tree(self.reaches.T, [root]) for root in self.number.values()]

    @property
    def reach_all(self) -> bool:
        """Whether every rank reaches every other one."""
        return all(len(edges) == len(self.number) - 1 for edges, _ in (*self.ahead, *self.back))

    def ways(self, demand: Demand, one_root: bool) -> list[tuple[Way, Fraction]]:
        """The ways of one demand."""
        readers = [self.number[r] for r in sorted(demand.readers) if not demand.is_served(r)]
        if len(demand.parts) == 1:
            return [(self._copies(demand, readers), Fraction(1))]
        roots = readers
        if one_root:
            roots = [min(readers, key=lambda root: self._rounds(demand, readers, root))]
        return [((self._sum(demand, readers, root),), Fraction(1, len(roots))) for root in roots]

    def _copies(self, demand: Demand, readers: list[int]) -> Way:
        """Trees from the holders, which take in ranks side by side."""
        (held,) = demand.parts
        holders = sorted(self.number[rank] for rank in held)
        edges, _ = _tree(self.reaches, holders)
        return trees_from(self.prices, holders, pruned(edges, holders, readers))

    def _holders(self, demand: Demand, root: int) -> list[int]:
        """The nearest holder of each part."""
        return [
            min((self.number[rank] for rank in held), key=lambda h: (self.back[root][1][h], h))
            for held in demand.parts
        ]

    def _rounds(self, demand: Demand, readers: list[int], root: int) -> tuple[int, int, int]:
        """Rounds to the root and on; of equal ones, the root that was used least."""
        there = max(self.back[root][1][holder] for holder in self._holders(demand, root))
        on = max(self.ahead[root][1][reader] for reader in readers)
        return there + on, self.used[root], root

    def _sum(self, demand: Demand, readers: list[int], root: int) -> Tree:
        """A tree from the nearest holder of each part to the root, and on to all readers."""
        self.used[root] += 1
        return tree_of(
            self.prices,
            root,
            pruned(self.back[root][0], [root], self._holders(demand, root)),
            pruned(self.ahead[root][0], [root], readers),
        )


def _tree(reaches: NDArray[np.bool_], roots: Sequence[int]) -> tuple[list[Edge], list[int]]:
    """The edges of trees from the roots, and the round after which each rank is reached."""
    count = len(reaches)
    rounds = [count] * count
    root_of, edges = {root: root for root in roots}, list[Edge]()
    for root in roots:
        rounds[root] = 0
    for number in range(1, count + 1):
        for rank, root in [*root_of.items()]:
            free = [b for b in np.flatnonzero(reaches[rank]).tolist() if b not in root_of]
            if free:
                child = min(free, key=lambda b: (b - root) % count)
                root_of[child] = root
                edges.append((rank, child))
                rounds[child] = number
    return edges, rounds
