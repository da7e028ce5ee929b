"""Cheapest ways: for prices of wires, the trees of least price that serve a demand.

A hop costs the prices of the wires that it passes, on the cheapest way through switches. Up to
``MAX_EXACT_ENDS`` parts and readers, trees are the cheapest that exist (Dreyfus and Wagner 1971,
for directed graphs). Beyond, they have one root and are the cheapest without relays (Chu and Liu
1965), whose edges are then chains of hops where these are cheaper; ``is_exact`` says when no way
costs less, as in an all-gather.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from rvdcomm.cost.demands import Demand
from rvdcomm.network import Node, Wire
from rvdcomm.synthesis.forest import Hop, Tree, Way

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MAX_EXACT_ENDS = 6
"""Ranks that must be reached by trees that are found exactly; time grows as 3 to this power."""

Edge = tuple[int, int]
"""A hop, by the numbers of its ranks."""


@dataclass(frozen=True)
class Chains:
    """The cheapest chains of hops.

    Attributes:
        hop: [src, dst]: the price of a hop.
        price: [src, dst]: the price of the cheapest chain.
        via: [src, dst]: the rank before dst on it.
    """

    hop: Floats
    price: Floats
    via: Ints

    @classmethod
    def of(cls, hop: Floats) -> Chains:
        """Floyd's algorithm; that of SciPy takes small prices for missing edges."""
        price = hop.copy()
        via = np.repeat(np.arange(len(hop))[:, None], len(hop), axis=1)
        for middle in range(len(hop)):
            through = price[:, middle, None] + price[None, middle]
            better = through < price
            price[better] = through[better]
            via = np.where(better, via[None, middle], via)
        return cls(hop, price, via)

    def edges(self, a: int, b: int) -> list[Edge]:
        """The hops of a chain."""
        found: list[Edge] = []
        while a != b:
            before = int(self.via[a, b])
            found.append((before, b))
            b = before
        return found[::-1]


@dataclass(frozen=True)
class Prices:
    """The cheapest hops between ranks, which are numbered in the order of ``ranks``.

    Attributes:
        ranks: the ranks.
        hop: [src, dst]: the price of a hop through switches alone.
        wires: the wires of the cheapest hop, by src and dst.
    """

    ranks: tuple[int, ...]
    hop: Floats
    wires: dict[Edge, tuple[int, ...]]

    @cached_property
    def ahead(self) -> Chains:
        """Chains of hops."""
        return Chains.of(self.hop)

    @cached_property
    def back(self) -> Chains:
        """Chains of hops against their direction."""
        return Chains.of(self.hop.T)


class Hops:
    """The ways through switches, between ranks, for any prices of wires."""

    def __init__(self, wires: Sequence[Wire], ranks: Iterable[int]) -> None:
        self.wires = tuple(wires)
        self.ranks = tuple(sorted(ranks))
        switches = sorted({e for w in wires for e in (w.src, w.dst)} - set(self.ranks), key=str)
        # A rank has a node that sends and a node that receives, so that no way passes a rank.
        count = len(self.ranks)
        self._out: dict[Node, int] = {rank: i for i, rank in enumerate(self.ranks)}
        self._in: dict[Node, int] = {rank: count + i for i, rank in enumerate(self.ranks)}
        for i, switch in enumerate(switches):
            self._out[switch] = self._in[switch] = 2 * count + i
        self._num_nodes = 2 * count + len(switches)
        self._rows = np.array([self._out[wire.src] for wire in wires])
        self._columns = np.array([self._in[wire.dst] for wire in wires])
        self._index = {
            (int(a), int(b)): i
            for i, (a, b) in enumerate(zip(self._rows, self._columns, strict=True))
        }

    def priced(self, prices: Floats) -> Prices:
        """The cheapest hops for these prices of the wires, none negative."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import dijkstra

        count = len(self.ranks)
        # A wire without a price is no missing wire; the little that is added breaks ties by length.
        data = prices + 1e-12 * float(prices.max()) + 1e-300
        shape = (self._num_nodes, self._num_nodes)
        graph = csr_array((data, (self._rows, self._columns)), shape=shape)
        found, before = dijkstra(graph, indices=range(count), return_predecessors=True)
        hop = found[:, count : 2 * count].copy()
        np.fill_diagonal(hop, 0.0)
        wires: dict[Edge, tuple[int, ...]] = {}
        for a in range(count):
            for b in range(count):
                if a != b and np.isfinite(hop[a, b]):
                    wires[a, b] = self._way(before[a], a, count + b)
        return Prices(self.ranks, hop, wires)

    def _way(self, before: NDArray[np.int32], start: int, node: int) -> tuple[int, ...]:
        found: list[int] = []
        while node != start:
            found.append(self._index[int(before[node]), node])
            node = int(before[node])
        return tuple(reversed(found))


def cheapest_way(demand: Demand, prices: Prices) -> tuple[float, Way]:
    """The least price of serving a demand, for one element, and trees that cost it."""
    return min(cheapest_ways(demand, prices), key=lambda found: found[0])


def cheapest_ways(demand: Demand, prices: Prices) -> list[tuple[float, Way]]:
    """The cheapest way and its price, among others if they are found on the way to it."""
    number = {rank: i for i, rank in enumerate(prices.ranks)}
    parts = [sorted(number[rank] for rank in held) for held in demand.parts]
    readers = sorted(number[rank] for rank in demand.readers if not demand.is_served(rank))
    if not readers:
        return [(0.0, ())]
    sums = trees_from_each(prices.back, parts)
    copies = trees_from_each(prices.ahead, [[reader] for reader in readers])
    if sums is None or copies is None:
        return _of_one_root(prices, parts, readers)
    # A group of readers has a root of its own, or is divided into groups that have.
    full = (1 << len(readers)) - 1
    least = [0.0] * (full + 1)
    chosen: list[tuple[int, int]] = [(-1, 0)] * (full + 1)
    for group in range(1, full + 1):
        totals = sums.costs[-1] + copies.costs[group]
        root = int(np.argmin(totals))
        least[group], chosen[group] = float(totals[root]), (root, 0)
        part = (group - 1) & group
        while part > group ^ part:
            if least[part] + least[group ^ part] < least[group] * (1 - 1e-12):
                least[group], chosen[group] = least[part] + least[group ^ part], (-1, part)
            part = (part - 1) & group
    found: list[Tree] = []
    left = [full]
    while left:
        group = left.pop()
        root, part = chosen[group]
        if root < 0:
            left += [part, group ^ part]
        else:
            found.append(tree_of(prices, root, sums.edges(-1, root), copies.edges(group, root)))
    return [(least[full], tuple(found))]


def is_exact(demand: Demand, ranks: Iterable[int]) -> bool:
    """Whether no way of serving a demand on these ranks costs less than ``cheapest_way``.

    So it is for few parts and readers, and where trees need no relays: all ranks are readers or
    holders of the one part, or all hold one part each and one or all of them are readers.
    """
    ranks, readers = set(ranks), {r for r in demand.readers if not demand.is_served(r)}
    if max(len(readers), len(demand.parts)) <= MAX_EXACT_ENDS:
        return True
    holders = set().union(*demand.parts)
    if len(demand.parts) == 1:
        return holders | readers == ranks
    is_one_each = all(len(held) == 1 for held in demand.parts)
    return is_one_each and holders == ranks and (len(readers) == 1 or readers == ranks)


@dataclass(frozen=True)
class SteinerTrees:
    """The cheapest trees from each node to each set of ends (Dreyfus and Wagner 1971).

    Attributes:
        costs: [sets of ends, nodes]: the price from a node to all ends of a set; a set is a number
            whose bits are its ends.
        chains: of these hops.
        nearest: [ends, nodes]: the node of an end's group that is nearest to a node.
        split: [sets, nodes]: the node at which the tree divides.
        parts: [sets, nodes]: one part of the set that is divided at a node.
    """

    costs: Floats
    chains: Chains
    nearest: Ints
    split: Ints
    parts: Ints

    def edges(self, group: int, root: int) -> list[Edge]:
        """The hops of a tree; a node that lies on two branches is reached once."""
        found: list[Edge] = []
        left = [(group % len(self.costs), root)]
        while left:
            ends, node = left.pop()
            if ends & (ends - 1) == 0:
                found += self.chains.edges(node, int(self.nearest[ends.bit_length() - 1, node]))
                continue
            at = int(self.split[ends, node])
            found += self.chains.edges(node, at)
            part = int(self.parts[ends, at])
            left += [(part, at), (ends ^ part, at)]
        return found


def trees_from_each(chains: Chains, ends: Sequence[Sequence[int]]) -> SteinerTrees | None:
    """The cheapest trees to groups of nodes, one of each of which has to be reached.

    None if there are more than ``MAX_EXACT_ENDS`` groups.
    """
    if len(ends) > MAX_EXACT_ENDS:
        return None
    chain = chains.price
    count, num_sets = len(chain), 1 << len(ends)
    nearest = np.array([[group[i] for i in np.argmin(chain[:, group], axis=1)] for group in ends])
    costs = np.zeros((num_sets, count))
    split, parts = (np.zeros((num_sets, count), dtype=np.int64) for _ in range(2))
    nodes = np.arange(count)
    for group in range(1, num_sets):
        if group & (group - 1) == 0:
            costs[group] = chain[nodes, nearest[group.bit_length() - 1]]
            continue
        divided = np.full(count, np.inf)
        part = (group - 1) & group
        while part > group ^ part:
            total = costs[part] + costs[group ^ part]
            better = total < divided
            divided[better], parts[group, better] = total[better], part
            part = (part - 1) & group
        through = chain + divided
        split[group] = np.argmin(through, axis=1)
        costs[group] = through[nodes, split[group]]
    return SteinerTrees(costs, chains, nearest, split, parts)


def _of_one_root(
    prices: Prices, parts: Sequence[Sequence[int]], readers: Sequence[int]
) -> list[tuple[float, Way]]:
    """Ways of one tree, for many parts or readers, from trees without relays; one for each root."""
    if len(parts) == 1:
        # All holders are one root: the tree falls into one for each holder that is used.
        cost, edges = arborescence(prices.ahead, parts[0], readers)
        return [(cost, trees_from(prices, parts[0], edges))]
    found: list[tuple[float, Way]] = []
    for root in readers if len(readers) == 1 else range(len(prices.ranks)):
        in_cost, back = arborescence(prices.back, [root], [part[0] for part in parts])
        out_cost, edges = arborescence(prices.ahead, [root], readers)
        found.append((in_cost + out_cost, (tree_of(prices, root, back, edges),)))
    return found


def trees_from(prices: Prices, holders: Sequence[int], edges: Sequence[Edge]) -> Way:
    """A tree for each holder that sends."""
    children: dict[int, list[int]] = {}
    for a, b in edges:
        children.setdefault(a, []).append(b)
    found = []
    for root in holders:
        mine, left = list[Edge](), [root]
        while left:
            node = left.pop()
            mine += [(node, child) for child in children.get(node, ())]
            left += children.get(node, ())
        if mine:
            found.append(tree_of(prices, root, [], mine))
    return tuple(found)


def arborescence(
    chains: Chains, roots: Sequence[int], ends: Iterable[int]
) -> tuple[float, list[Edge]]:
    """The cheapest hops over which each end is reached once from some root (Chu and Liu 1965).

    Relays are used where a chain of hops is cheaper than a hop.
    """
    chain = chains.price
    wanted = [end for end in ends if end not in roots]
    if not wanted:
        return 0.0, []
    # Node 0 stands for all roots.
    nodes = [-1, *wanted]
    cost = np.full((len(nodes), len(nodes)), np.inf)
    cost[1:, 1:] = chain[np.ix_(wanted, wanted)]
    sources = [roots[i] for i in np.argmin(chain[np.ix_(roots, wanted)], axis=0)]
    cost[0, 1:] = chain[sources, wanted]
    np.fill_diagonal(cost, np.inf)
    into = cheapest_into(cost)
    found: list[Edge] = []
    for i, before in enumerate(into[1:], start=1):
        b = nodes[i]
        a = sources[i - 1] if before == 0 else nodes[before]
        found += chains.edges(a, b)
    kept = pruned(found, roots, wanted)
    return sum(float(chains.hop[edge]) for edge in kept), kept


def cheapest_into(cost: Floats) -> list[int]:
    """For each node but 0, the node before it in the cheapest tree from node 0.

    ``cost[a, b]`` is the price from a to b. Edmonds' algorithm: each node takes its cheapest edge;
    a circle becomes one node, and costs of edges into it count what they replace.
    """
    count = len(cost)
    into = np.argmin(cost, axis=0)
    into[0] = 0
    circle = np.array(_circle(into), dtype=np.int64)
    if not len(circle):
        return [int(before) for before in into]
    inside = np.zeros(count, dtype=np.bool_)
    inside[circle] = True
    rest = np.flatnonzero(~inside)
    # The circle becomes the last node.
    smaller = np.full((len(rest) + 1, len(rest) + 1), np.inf)
    smaller[:-1, :-1] = cost[np.ix_(rest, rest)]
    paid = cost[into[circle], circle]
    entering = cost[np.ix_(rest, circle)] - paid
    first = np.argmin(entering, axis=1)
    smaller[:-1, -1] = entering[np.arange(len(rest)), first]
    leaving = cost[np.ix_(circle, rest)]
    last = np.argmin(leaving, axis=0)
    smaller[-1, :-1] = leaving[last, np.arange(len(rest))]
    before = cheapest_into(smaller)
    found = [int(x) for x in into]
    for i, node in enumerate(rest):
        if node:
            j = before[i]
            found[node] = int(circle[last[i]]) if j == len(rest) else int(rest[j])
    source = before[len(rest)]
    found[circle[first[source]]] = int(rest[source])
    return found


def _circle(into: Ints) -> list[int]:
    """A circle of nodes, each of which is before the next; empty if there is none."""
    state = np.zeros(len(into), dtype=np.int64)
    for start in range(1, len(into)):
        node, path = start, list[int]()
        while node and not state[node]:
            state[node] = start
            path.append(node)
            node = int(into[node])
        if node and state[node] == start and node in path:
            return path[path.index(node) :]
    return []


# --- from numbers to hops ----------------------------------------------------------------------


def tree_of(prices: Prices, root: int, back: Sequence[Edge], edges: Sequence[Edge]) -> Tree:
    """A tree of hops; ``back`` are the edges of its sums, reversed."""
    sums = [(b, a) for a, b in pruned(back, [root], {b for _, b in back})]
    copies = pruned(edges, [root], {b for _, b in edges})
    return Tree(
        prices.ranks[root],
        tuple(_hop(prices, edge) for edge in sums),
        tuple(_hop(prices, edge) for edge in copies),
    )


def _hop(prices: Prices, edge: Edge) -> Hop:
    return Hop(prices.ranks[edge[0]], prices.ranks[edge[1]], prices.wires[edge])


def pruned(edges: Sequence[Edge], roots: Iterable[int], ends: Iterable[int]) -> list[Edge]:
    """Of these edges, those of a tree from the roots; branches that lead to no end are cut off."""
    ahead: dict[int, list[int]] = {}
    for a, b in edges:
        ahead.setdefault(a, []).append(b)
    before: dict[int, int] = {}
    seen, left = set(roots), sorted(roots)
    while left:
        node = left.pop(0)
        for child in ahead.get(node, ()):
            if child not in seen:
                seen.add(child)
                before[child] = node
                left.append(child)
    needed: set[int] = set()
    for end in ends:
        while end in before and end not in needed:
            needed.add(end)
            end = before[end]
    return [(a, b) for b, a in before.items() if b in needed]
