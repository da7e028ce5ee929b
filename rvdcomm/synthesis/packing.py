"""Pack: shares of trees for which the busiest wire takes least time.

A linear program over the ways of all demands: the shares of a demand add up to 1, and no wire takes
longer than the time, which is least. There are too many ways to list, so it starts with a few, and
adds for each demand the cheapest way at the prices that the program gives to wires (column
generation, as for multicommodity flows: Ford and Fulkerson 1958). When no way is cheaper than what
a demand pays, no other shares of any ways take less time; before, the prices give a bound. HiGHS
solves the programs, through SciPy.

Fractions that the program gives are rounded to whole chunks of at most ``max_ways`` ways of each
demand and roots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from rvdcomm.cost.demands import Demand
from rvdcomm.network import Wire
from rvdcomm.synthesis.cheapest import Hops, cheapest_ways, is_exact
from rvdcomm.synthesis.forest import Forest, Way, loads_of, unserved

Floats = NDArray[np.float64]

MAX_ROUNDS = 200
"""Times that ways are added."""

NEAR = 1e-3
"""Packing ends when the time is this near to the bound that the prices give."""

SMOOTHING = 0.6
"""Weight of the best prices so far."""

ROUNDING = 1e-9
"""How much lower the bound is stated, because of ties that are broken and of rounding."""

MAX_WAYS = 8
"""Ways of a demand, as many trees a root as other systems use."""

CHUNKS = 10080
"""Parts of a demand's elements; a number that many small numbers divide."""


def pack(demands: Sequence[Demand], wires: Sequence[Wire], max_ways: int = MAX_WAYS) -> Forest:
    """Ways for all demands, near the least time of the busiest wire.

    Args:
        demands: what to serve.
        wires: the wires that may be used; they connect all ranks that hold or need something.
        max_ways: the most ways of a demand that have equal roots.
    """
    demands = unserved(demands)
    if not demands:
        return Forest((), (), tuple(wires))
    ranks = {rank for demand in demands for rank in demand.readers.union(*demand.parts)}
    hops = Hops(wires, ranks)
    state = _State(tuple(demands), np.array([wire.link.bytes_per_sec for wire in wires]))
    _price(state, hops, np.ones(len(wires)), None)
    least, center, paid = 0.0, np.zeros(len(wires)), list[float]()
    for _ in range(MAX_ROUNDS):
        solved = state.solve()
        if solved.secs <= least * (1 + NEAR):
            break
        # Prices that jump to and fro add many ways of little use; so they move from the best ones
        # so far (Wentges 1997), unless these add none.
        for weight in (SMOOTHING, 0.0) if least else (0.0,):
            tried = weight * center + (1 - weight) * solved.prices
            found, has_new = _price(state, hops, tried, solved.paid)
            bound = sum(n.num_elements * secs for n, secs in zip(demands, found, strict=True))
            if bound > least:
                least, center, paid = bound, tried, found
            if has_new:
                break
        else:
            break
    if not all(is_exact(demand, ranks) for demand in demands):
        paid = []
    # A little less, because ties between hops are broken by a little more than their price.
    known = tuple(secs * (1 - ROUNDING) for secs in paid)
    return Forest(tuple(demands), _rounded(state, max_ways), tuple(wires), known)


def _price(
    state: _State, hops: Hops, prices: Floats, paid: Floats | None
) -> tuple[list[float], bool]:
    """The price of an element of each demand, whose sum over all elements is a bound, for these
    prices of seconds of wires; and whether they give a new way.

    New are the cheapest way of each demand, and others that cost less than the demand pays.
    """
    priced = hops.priced(prices / state.rates)
    prices_of, has_new = list[float](), False
    for i, demand in enumerate(state.demands):
        found = cheapest_ways(demand, priced)
        least = min(cost for cost, _ in found)
        prices_of.append(least)
        for cost, way in found:
            if cost == least or paid is None or cost * demand.num_elements < paid[i]:
                has_new |= state.add(i, way)
    return prices_of, has_new


@dataclass(frozen=True)
class _Solved:
    """The least time, the share of each way, the price of a second of each wire, and what each
    demand pays; prices of wires add up to 1.
    """

    secs: float
    shares: Floats
    prices: Floats
    paid: Floats


@dataclass
class _State:
    """The ways so far, by demand, and the program over them."""

    demands: tuple[Demand, ...]
    rates: Floats
    ways: list[tuple[int, Way]] = field(default_factory=list)
    known: set[tuple[int, Way]] = field(default_factory=set)
    loads: list[Floats] = field(default_factory=list)

    def add(self, demand: int, way: Way) -> bool:
        """Add a way of a demand; False if it is there."""
        if (demand, way) in self.known:
            return False
        self.known.add((demand, way))
        self.ways.append((demand, way))
        load = np.zeros(len(self.rates))
        for wire, count in loads_of(way).items():
            load[wire] = count
        self.loads.append(load * self.demands[demand].num_elements / self.rates)
        return True

    def solve(self) -> _Solved:
        """The best shares of the ways."""
        from scipy.optimize import linprog
        from scipy.sparse import csr_array

        count, loads = len(self.ways), np.array(self.loads).T
        # Loads of the order of 1, for the solver's tolerances.
        scale = float(loads.max()) or 1.0
        limits = csr_array(np.hstack([loads / scale, -np.ones((len(self.rates), 1))]))
        of_demand = np.zeros((len(self.demands), count + 1))
        of_demand[[demand for demand, _ in self.ways], range(count)] = 1
        found = linprog(
            [*[0.0] * count, 1.0],
            A_ub=limits, b_ub=np.zeros(len(self.rates)),
            A_eq=csr_array(of_demand), b_eq=np.ones(len(self.demands)), method="highs",
        )  # fmt: skip
        prices = np.maximum(-found.ineqlin.marginals, 0.0)
        total = float(prices.sum()) or 1.0
        return _Solved(
            float(found.fun) * scale, found.x[:-1], prices / total, found.eqlin.marginals * scale
        )


def _rounded(state: _State, max_ways: int) -> tuple[tuple[tuple[Way, Fraction], ...], ...]:
    """Whole numbers of chunks, for at most ``max_ways`` ways of each demand and roots."""
    few = _State(state.demands, state.rates)
    for i in _largest(state, state.solve().shares, max_ways):
        few.add(*state.ways[i])
    shares = few.solve().shares
    found = []
    for demand in range(len(few.demands)):
        mine = [i for i, (of, _) in enumerate(few.ways) if of == demand]
        counts = {i: int(shares[i] * CHUNKS) for i in mine}
        # The largest remainders get the chunks that are left.
        order = sorted(mine, key=lambda i: (counts[i] - shares[i] * CHUNKS, i))
        for i in order[: CHUNKS - sum(counts.values())]:
            counts[i] += 1
        found.append(tuple((few.ways[i][1], Fraction(n, CHUNKS)) for i, n in counts.items() if n))
    return tuple(found)


def _largest(state: _State, shares: Floats, max_ways: int) -> list[int]:
    """The ways of the largest shares, of each demand and roots."""
    found: dict[tuple[int, tuple[int, ...]], list[int]] = {}
    for i in sorted(range(len(shares)), key=lambda i: (-shares[i], i)):
        demand, way = state.ways[i]
        mine = found.setdefault((demand, tuple(tree.root for tree in way)), [])
        if shares[i] > 1e-9 and len(mine) < max_ways:
            mine.append(i)
    return sorted(i for mine in found.values() for i in mine)
