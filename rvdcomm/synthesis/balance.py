"""Balance: trees that are chosen one after another, each over the wires that have least to do.

The elements of each demand are cut into equal *units*, and every unit gets a way of its own. Hops
are priced by the load that wires have so far: the price of a second rises with a power of the load,
as in the multiplicative weights of Garg and Könemann (1998). A tree grows by its cheapest next hop
(Prim 1957), where depth has a price, since deep trees take many rounds. The roots of sums that many
ranks need take turns. Then units are taken out and put back, and the best state is kept.

Nothing proves how near the bound this comes. Where ranks reach each other through switches it is
near (docs/synthesis.md); ``packing`` is exact, and slow. All machines find the same trees, since
prices are products and sums of floats in a fixed order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from rvdcomm.cost.demands import Demand
from rvdcomm.network import Wire
from rvdcomm.synthesis.cheapest import (
    Chains,
    Edge,
    Floats,
    Hops,
    Prices,
    tree_of,
    trees_from,
)
from rvdcomm.synthesis.forest import Forest, Way, loads_of, unserved

NUM_PASSES = 3
"""Times that each unit is put in."""

DOUBLINGS = 3
"""The price of a second rises with the load to the power 2 to this number."""

LEAST_PRICE = 0.1
"""The price of a second of a wire without load, that of the busiest wire being 1 more. So wires are
not wasted where none is short."""

PARTNER_PRICE = 0.3
"""The price of a message between ranks that send each other nothing else, as a share of the median
price of a hop: so ranks have few partners."""


@dataclass(frozen=True, slots=True)
class Style:
    """What balanced trees are like.

    Attributes:
        units_a_rank: units of all demands for each rank. Fewer units have fewer messages, more come
            nearer to the bound.
        depth_price: the price of a level of depth, as a share of the median price of a hop: a high
            one gives trees of few rounds.
        by_host: whether hosts take turns as roots of sums, and then their ranks: even where hosts
            have unequal numbers of ranks, all get as many. Otherwise all ranks get as many.
    """

    units_a_rank: int = 2
    depth_price: float = 0.3
    by_host: bool = False


def balance(demands: Sequence[Demand], wires: Sequence[Wire], style: Style) -> Forest:
    """Ways for all demands; ``wires`` connect all ranks that hold or need something."""
    demands = unserved(demands)
    if not demands:
        return Forest((), (), tuple(wires))
    loads = _Loads(wires, {rank for d in demands for rank in d.readers.union(*d.parts)}, style)
    least_units = max(2, -(-style.units_a_rank * len(loads.ranks) // len(demands)))
    roots = [loads.roots(demand) for demand in demands]
    # As many units for each root.
    num_units = [
        -(-least_units // len(each)) * len(each) if each else least_units for each in roots
    ]
    units = sorted((turn, i) for i, count in enumerate(num_units) for turn in range(count))
    chosen: dict[tuple[int, int], Way] = {}
    best: dict[tuple[int, int], Way] = {}
    least = np.inf
    for _ in range(NUM_PASSES):
        for turn, i in units:
            demand, size = demands[i], demands[i].num_elements / num_units[i]
            if (turn, i) in chosen:
                loads.add(chosen[turn, i], size, -1)
            root = roots[i][turn % len(roots[i])] if roots[i] else None
            chosen[turn, i] = loads.priced(size).way(demand, root)
            loads.add(chosen[turn, i], size, 1)
        if loads.busy.max() < least:
            least, best = loads.busy.max(), dict(chosen)
    counts: list[Counter[Way]] = [Counter() for _ in demands]
    for turn, i in units:
        counts[i][best[turn, i]] += 1
    ways = (
        tuple((way, Fraction(n, total)) for way, n in count.items())
        for count, total in zip(counts, num_units, strict=True)
    )
    return Forest(demands, tuple(ways), tuple(wires))


class _Loads:
    """How long every wire is busy so far, if an element is a byte, and who sends to whom."""

    def __init__(self, wires: Sequence[Wire], ranks: Iterable[int], style: Style) -> None:
        self.style = style
        self.rates = np.array([wire.link.bytes_per_sec for wire in wires])
        # A hop takes the wires on which it takes least time when nothing else is sent.
        self.quickest = Hops(wires, ranks).priced(1 / self.rates)
        self.ranks = self.quickest.ranks
        self.number = {rank: i for i, rank in enumerate(self.ranks)}
        count = len(self.ranks)
        longest = max(map(len, self.quickest.wires.values()))
        # [place in the hop, src, dst]: a wire; one more stands for none.
        self.passed = np.full((longest, count, count), len(wires))
        for (a, b), mine in self.quickest.wires.items():
            self.passed[: len(mine), a, b] = mine
        self.busy = np.zeros(len(wires))
        self.num_sent = np.zeros((count, count), dtype=np.int64)
        self.hosts = _hosts(wires, self.quickest)

    def roots(self, demand: Demand) -> list[int]:
        """The ranks at which parts of units meet, in turn; none if there is one part."""
        if len(demand.parts) == 1:
            return []
        readers = sorted(rank for rank in demand.readers if not demand.is_served(rank))
        if not self.style.by_host:
            return readers
        groups: dict[int, list[int]] = {}
        for rank in readers:
            groups.setdefault(self.hosts[rank], []).append(rank)
        rounds = range(max(map(len, groups.values())))
        return [group[i % len(group)] for i in rounds for group in groups.values()]

    def add(self, way: Way, num_elements: float, times: int) -> None:
        """Add what a way sends, or take it away (``times`` is -1)."""
        for wire, count in sorted(loads_of(way).items()):
            self.busy[wire] += times * count * num_elements / self.rates[wire]
        for tree in way:
            for hop in (*tree.sums, *tree.copies):
                self.num_sent[self.number[hop.src], self.number[hop.dst]] += times

    def priced(self, num_elements: float) -> _Growth:
        """Prices of hops for so many elements more."""
        took = num_elements / self.rates
        # Wires may be infinitely fast.
        weight = (self.busy + took) / (float((self.busy + took).max()) or 1.0)
        for _ in range(DOUBLINGS):
            weight = weight * weight
        price = np.append((weight + LEAST_PRICE) * took, 0.0)
        hop = price[self.passed[0]]
        for wires in self.passed[1:]:
            hop = hop + price[wires]
        is_hop = np.isfinite(self.quickest.hop)
        median = float(np.median(hop[is_hop]))
        hop[self.num_sent == 0] += PARTNER_PRICE * median
        hop[~is_hop] = np.inf
        np.fill_diagonal(hop, 0.0)
        prices = Prices(self.ranks, hop, self.quickest.wires)
        return _Growth(prices, self.style.depth_price * median)


def _hosts(wires: Sequence[Wire], hops: Prices) -> dict[int, int]:
    """For each rank one of those that it reaches by hops that are quicker than the slowest ones."""
    alphas = {
        pair: max(wires[wire].link.alpha_secs for wire in mine) for pair, mine in hops.wires.items()
    }
    far = max(alphas.values())
    hosts = {rank: rank for rank in hops.ranks}
    for (a, b), alpha in sorted(alphas.items()):
        if alpha < far:
            one, other = hosts[hops.ranks[a]], hosts[hops.ranks[b]]
            first, last = min(one, other), max(one, other)
            hosts |= {rank: first for rank, host in hosts.items() if host == last}
    return hosts


class _Growth:
    """How trees grow at certain prices of hops and of a level of depth."""

    def __init__(self, prices: Prices, depth_price: float) -> None:
        self.prices, self.depth_price = prices, depth_price
        # Where a rank does not reach each other one in one hop, chains of hops are edges.
        self._is_whole = bool(np.isfinite(prices.hop).all())

    def way(self, demand: Demand, root: int | None) -> Way:
        """Trees that serve a demand; parts meet at the root."""
        number = {rank: i for i, rank in enumerate(self.prices.ranks)}
        parts = [sorted(number[rank] for rank in held) for held in demand.parts]
        ends = [[number[r]] for r in sorted(demand.readers) if not demand.is_served(r)]
        if root is None:
            return trees_from(self.prices, parts[0], self._grown(False, parts[0], ends))
        back = self._grown(True, [number[root]], parts)
        edges = self._grown(False, [number[root]], ends)
        return (tree_of(self.prices, number[root], back, edges),)

    def _grown(
        self, is_back: bool, roots: Sequence[int], groups: Sequence[Sequence[int]]
    ) -> list[Edge]:
        """Edges over which one of each group is reached from some root; against hops if asked."""
        if self._is_whole:
            hop = self.prices.hop.T if is_back else self.prices.hop
            return grown(hop, None, roots, groups, self.depth_price)
        chains = self.prices.back if is_back else self.prices.ahead
        return grown(chains.price, chains, roots, groups, self.depth_price)


def grown(
    price: Floats,
    chains: Chains | None,
    roots: Sequence[int],
    groups: Sequence[Sequence[int]],
    depth_price: float,
) -> list[Edge]:
    """Edges over which one of each group is reached from some root, the cheapest first.

    Args:
        price: [from, to]: of an edge, or of the chain of edges in ``chains``.
        chains: where an edge is missing; None if none is.
        roots, groups: numbers of nodes.
        depth_price: what each edge between a root and the start of an edge adds to its price.
    """
    left = [group for group in groups if set(group).isdisjoint(roots)]
    depth = np.zeros(len(price))
    inside = list(roots)
    found: list[Edge] = []
    # The cheapest offer to each node, and the node that makes it.
    offer = np.full(len(price), np.inf)
    offered_by = np.zeros(len(price), dtype=np.int64)

    def reach(node: int) -> None:
        mine = price[node] + depth_price * (depth[node] + 1)
        is_better = mine < offer
        offer[is_better], offered_by[is_better] = mine[is_better], node

    for root in roots:
        reach(root)
    while left:
        ends = sorted({node for group in left for node in group})
        end = ends[int(np.argmin(offer[ends]))]
        start = int(offered_by[end])
        edges = [(start, end)] if chains is None else chains.edges(start, end)
        for a, b in edges:
            if b not in inside:
                found.append((a, b))
                depth[b] = depth[a] + 1
                inside.append(b)
                reach(b)
        left = [group for group in left if set(group).isdisjoint(inside)]
    return found
