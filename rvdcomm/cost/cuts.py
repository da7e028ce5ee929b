"""Flow bound: the least time that a network needs for a pair of layouts, by cuts.

Take a set of nodes, and the elements that some rank in it needs and of which no rank in it has some
part. A message with each of them has to enter the set, over the wires that lead into it. The bound
is the largest time that such a *cut* gives. The cuts that are tried are

- for each reader, a minimum cut between what it lacks and the reader, with capacities of rate x
  time: the time of the cut that is found is tried next, until nothing is cut (Dinkelbach's method);
- for each rank that alone has a part, the same with all wires reversed;
- the ranks alone, and what wires above each rate connect;
- all sets, in a small network.

For a broadcast, an all-gather and their reverses this is the least time of any schedule (Edmonds'
theorem on branchings; Zhao et al. 2024, arXiv:2402.06787). For other pairs it is a lower bound.

Besides, all messages together need their time, as in a topology (docs/bound.md, "Messages in all").

Source: docs/bound.md, "On any network".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from rvdcomm.cost.bound import lower_bound
from rvdcomm.cost.demands import Demand, Ranks, demands_of, in_units
from rvdcomm.cost.ports import Cost
from rvdcomm.layout import Layout, ranges_text
from rvdcomm.network import Network, Node, Wire, connected, reach

MAX_CAPACITY = 1 << 30
"""Capacities are whole numbers of 32 bits; this one stands for all that there is."""

MAX_TRIES = 64
"""Cuts that are tried for a rank; each is better than the one before, and a few suffice."""

MAX_NODES_OF_ALL_CUTS = 10
"""Up to this many nodes every set of them is tried."""

MAX_CUT_NODES = 1 << 22
"""Cuts times nodes of arrays that are computed with at a time."""

Cut = frozenset[Node]


@dataclass(frozen=True, slots=True)
class FlowBound:
    """A lower bound on the seconds of any plan, without latencies.

    Attributes:
        secs: the bound.
        cut: the nodes that elements have to enter, or to leave, in that time; empty if the bound
            is that of all messages together.
        is_out: whether they have to leave them.
    """

    secs: float
    cut: tuple[Node, ...] = ()
    is_out: bool = False

    @property
    def why(self) -> str:
        """What takes this time, as a short text."""
        if not self.cut:
            return "all messages together"
        way = "out of" if self.is_out else "into"
        ranks = [node for node in self.cut if isinstance(node, int)]
        if len(ranks) == 1:
            return f"{way} rank {ranks[0]}"
        return f"{way} ranks {ranges_text(ranks)} together"


def flow_bound(src: Layout, dst: Layout, item_bytes: int, network: Network) -> FlowBound:
    """The largest of the bounds of all cuts that are tried, and of all messages together.

    Only ranks of ``src`` and ``dst`` take part: the wires of other ranks are left out, unless some
    rank would then be out of reach. With several value parts of ``dst`` the bound is 0.
    """
    members = {*src.ranks, *dst.ranks}
    network.check_ranks(members)
    if dst.rvd.v > 1:
        return FlowBound(0.0)
    wires = wires_of_members(network, members)
    demands = demands_of(src, dst)
    divisions = list(_divisions(network, wires, members))
    adds = any(switch.adds for switch in network.switches)
    cuts = _Cuts(wires, demands)
    # Any cut gives a bound, so those of demands that are nearly alike serve as well.
    _, alike, _ = in_units(demands)
    tried = dict.fromkeys(
        chain(
            (frozenset({rank}) for rank in sorted(members)),
            _of_divisions(divisions),
            _minimum_cuts(tuple(wires), alike),
            cuts.all() if len(cuts.nodes) <= MAX_NODES_OF_ALL_CUTS else (),
        )
    )
    found = [cuts.bound(list(tried))]
    found += [FlowBound(_messages_secs(demands, wires, homes, adds)) for homes in divisions]
    best = max(found, key=lambda bound: bound.secs)
    return FlowBound(best.secs * item_bytes, best.cut, best.is_out)


def network_bound(
    src: Layout, dst: Layout, item_bytes: int, network: Network, least_secs: float = 0.0
) -> Cost:
    """A lower bound on every field of the cost of any plan on a network.

    ``secs`` are those of ``flow_bound``, or ``least_secs`` if somebody knows more, and the latency
    of the quickest wire if anything moves. The other fields do not depend on how fast wires are.
    """
    counted = lower_bound(src, dst, item_bytes, network.nearest_levels)
    flow = max(flow_bound(src, dst, item_bytes, network).secs, least_secs)
    secs = flow + counted.rounds * network.least_alpha_secs
    return replace(counted, secs=secs)


def wires_of_members(network: Network, members: set[int]) -> list[Wire]:
    """The wires between members and switches; all wires if these do not connect the members.

    In that case the other ranks forward messages as switches do.
    """
    kept = [
        wire
        for wire in network.wires
        if all(isinstance(end, str) or end in members for end in (wire.src, wire.dst))
    ]
    is_connected = all(members <= reached for reached in reach(kept, min(members)))
    return kept if is_connected else list(network.wires)


class _Cuts:
    """The times of cuts, in seconds if an element is a byte."""

    def __init__(self, wires: Sequence[Wire], demands: Sequence[Demand]) -> None:
        ends = {end for wire in wires for end in (wire.src, wire.dst)}
        ends |= {rank for d in demands for rank in d.readers.union(*d.parts)}
        self.nodes = sorted(ends, key=lambda node: (isinstance(node, str), node))
        self._index = {node: i for i, node in enumerate(self.nodes)}
        self._rates = np.array([wire.link.bytes_per_sec for wire in wires])
        self._tails = np.array([self._index[wire.src] for wire in wires], dtype=np.int64)
        self._heads = np.array([self._index[wire.dst] for wire in wires], dtype=np.int64)
        self._sizes = np.array([demand.num_elements for demand in demands])
        self._readers = self._mask([demand.readers for demand in demands])
        num_parts = len(demands[0].parts) if demands else 1
        self._parts = [
            self._mask([demand.parts[i] for demand in demands]) for i in range(num_parts)
        ]

    def _mask(self, groups: Sequence[Ranks]) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        """[groups, nodes]: 1 where a node is in a group."""
        mask = np.zeros((len(groups), len(self.nodes)), dtype=np.float32)
        for row, group in zip(mask, groups, strict=True):
            row[[self._index[rank] for rank in group]] = 1
        return mask

    def all(self) -> Iterator[Cut]:
        """Every set of nodes."""
        for chosen in range(1, 1 << len(self.nodes)):
            yield frozenset(node for i, node in enumerate(self.nodes) if chosen >> i & 1)

    def bound(self, cuts: Sequence[Cut]) -> FlowBound:
        """The bound of the cut that takes longest, each taken both ways."""
        best = FlowBound(0.0)
        for some in _chunks(cuts, 1 + MAX_CUT_NODES // len(self.nodes)):
            inside = np.array([[node in cut for node in self.nodes] for cut in some], np.bool_)
            for is_out, sides in ((False, inside), (True, ~inside)):
                secs = self._secs(sides)
                slowest = int(np.argmax(secs))
                if secs[slowest] > best.secs:
                    cut = tuple(node for node in self.nodes if node in some[slowest])
                    best = FlowBound(float(secs[slowest]), cut, is_out)
        return best

    def _secs(self, inside: NDArray[np.bool_]) -> NDArray[np.float64]:
        """[cuts]: the time that what has to enter the nodes ``inside`` takes; [cuts, nodes]."""
        columns = inside.T.astype(np.float32)
        is_needed = self._readers @ columns > 0
        is_apart = np.any([part @ columns == 0 for part in self._parts], axis=0)
        enters = self._sizes @ (is_needed & is_apart)
        rates = (inside[:, self._heads] & ~inside[:, self._tails]) @ self._rates
        secs: NDArray[np.float64] = np.divide(
            enters, rates, out=np.zeros(len(inside)), where=enters > 0
        )
        return secs


def _chunks(cuts: Sequence[Cut], size: int) -> Iterator[Sequence[Cut]]:
    return (cuts[i : i + size] for i in range(0, len(cuts), size))


# --- minimum cuts of a reader and of a sender --------------------------------------------------

_Lacked = Counter[Ranks]
"""Elements by the ranks that have what is lacked."""


@lru_cache(maxsize=256)
def _minimum_cuts(wires: tuple[Wire, ...], demands: tuple[Demand, ...]) -> tuple[Cut, ...]:
    reverse = [Wire(wire.dst, wire.src, wire.link) for wire in wires]
    return tuple(
        flows.slowest_cut(rank, lacked)
        for needs, flows in ((_into(demands), _Flows(wires)), (_out_of(demands), _Flows(reverse)))
        for rank, lacked in sorted(needs.items())
    )


def _into(demands: Iterable[Demand]) -> dict[int, _Lacked]:
    """What each reader lacks: one of the parts that it does not have, from the fewest ranks."""
    found: dict[int, _Lacked] = {}
    for demand in demands:
        for rank in demand.readers:
            lacked = [holders for holders in demand.parts if rank not in holders]
            if lacked:
                part = min(lacked, key=lambda holders: (len(holders), sorted(holders)))
                found.setdefault(rank, Counter())[part] += demand.num_elements
    return found


def _out_of(demands: Iterable[Demand]) -> dict[int, _Lacked]:
    """What only one rank has a part of, by the ranks that need it, one of which must get it."""
    found: dict[int, _Lacked] = {}
    for demand in demands:
        for rank in {min(holders) for holders in demand.parts if len(holders) == 1}:
            others = demand.readers - {rank}
            if others:
                found.setdefault(rank, Counter())[others] += demand.num_elements
    return found


class _Flows:
    """Minimum cuts of one set of wires, between groups of ranks and one rank."""

    def __init__(self, wires: Sequence[Wire]) -> None:
        ends: Iterable[Node] = (end for wire in wires for end in (wire.src, wire.dst))
        self._index: Mapping[Node, int] = {node: i for i, node in enumerate(dict.fromkeys(ends))}
        self._nodes = list(self._index)
        self._ends = [(self._index[wire.src], self._index[wire.dst]) for wire in wires]
        self._rates = np.array([wire.link.bytes_per_sec for wire in wires])

    def slowest_cut(self, rank: int, lacked: _Lacked) -> Cut:
        """The nodes on the rank's side of the cut that takes longest.

        ``lacked`` are the elements by the ranks of which any may send them.
        """
        secs, cut = 0.0, Cut({rank})
        for _ in range(MAX_TRIES):
            outside = sum(n for holders, n in lacked.items() if not holders & cut)
            found = outside / self._rate_into(cut) if outside else 0.0
            if found <= secs * (1 + 1e-9):
                break
            secs, best = found, cut
            cut = self._cut(rank, lacked, secs)
        return best if secs else cut

    def _rate_into(self, nodes: Cut) -> float:
        inside = {self._index[node] for node in nodes}
        entering = [b in inside and a not in inside for a, b in self._ends]
        return float(self._rates[entering].sum())

    def _cut(self, rank: int, lacked: _Lacked, secs: float) -> Cut:
        """The nodes on the rank's side of a minimum cut."""
        from scipy.sparse import csr_array
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        num_nodes = len(self._nodes)
        source = num_nodes + len(lacked)
        scale = MAX_CAPACITY / sum(lacked.values())
        rows = [a for a, _ in self._ends]
        columns = [b for _, b in self._ends]
        capacities = list(np.minimum(self._rates * secs * scale, MAX_CAPACITY))
        for i, (holders, elements) in enumerate(lacked.items()):
            rows += [source, *[num_nodes + i] * len(holders)]
            columns += [num_nodes + i, *(self._index[holder] for holder in sorted(holders))]
            capacities += [elements * scale, *[MAX_CAPACITY] * len(holders)]
        whole = np.floor(np.array(capacities)).astype(np.int32)
        graph = csr_array((whole, (rows, columns)), shape=(source + 1, source + 1))
        left = (graph - maximum_flow(graph, source, self._index[rank]).flow).tocsr()
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        outside = set(map(int, breadth_first_order(left, source, return_predecessors=False)))
        return Cut(node for i, node in enumerate(self._nodes) if i not in outside)


# --- divisions of all nodes, and all messages between their homes ------------------------------

_Homes = Mapping[Node, int]


def _divisions(network: Network, wires: Sequence[Wire], members: set[int]) -> Iterator[_Homes]:
    """Ways to divide the nodes: single ranks, what wires above each rate connect, and levels."""
    yield {rank: i for i, rank in enumerate(sorted(members))}
    yield from _of_levels(network, members)
    for rate in sorted({wire.link.bytes_per_sec for wire in wires}):
        homes = connected(wire for wire in wires if wire.link.bytes_per_sec > rate)
        homes |= {rank: rank for rank in members if rank not in homes}
        number = {
            home: i for i, home in enumerate(dict.fromkeys(homes[r] for r in sorted(members)))
        }
        if 1 < len(number) < len(members):
            yield {node: number[home] for node, home in homes.items() if home in number}


def _of_levels(network: Network, members: set[int]) -> Iterator[_Homes]:
    """The nodes under each switch of a level, for all levels but the ranks."""
    homes: dict[Node, Node] = {rank: rank for rank in network.ranks}
    while True:
        inner = homes
        homes = {node: network.above[home] for node, home in homes.items() if home in network.above}
        homes |= {home: home for home in homes.values()}
        used = dict.fromkeys(homes[rank] for rank in sorted(members) if rank in homes)
        if len(used) < 2 or homes == inner:
            return
        number = {home: i for i, home in enumerate(used)}
        yield {node: number[home] for node, home in homes.items() if home in number}


def _of_divisions(divisions: Iterable[_Homes]) -> Iterator[Cut]:
    for homes in divisions:
        nodes: dict[int, list[Node]] = {}
        for node, home in homes.items():
            nodes.setdefault(home, []).append(node)
        yield from map(Cut, nodes.values())


def _messages_secs(
    demands: Sequence[Demand], wires: Sequence[Wire], homes: _Homes, adds: bool
) -> float:
    """Each message between homes enters one, over the wires that lead into homes."""
    rate = sum(
        wire.link.bytes_per_sec
        for wire in wires
        if wire.dst in homes and homes.get(wire.src) != homes[wire.dst]
    )
    return sum(d.num_elements * _messages(d, homes, adds) for d in demands) / rate if rate else 0.0


def _messages(demand: Demand, homes: _Homes, adds: bool) -> int:
    """The fewest messages between homes for one element (docs/bound.md, "Messages in all").

    If switches add, parts may meet in a switch, and only what enters readers is certain.
    """
    parts = [{homes[rank] for rank in holders} for holders in demand.parts]
    readers = {homes[rank] for rank in demand.readers}
    complete = set.intersection(*parts)
    if complete or adds:
        return len(readers - complete)
    most = max(Counter(home for holders in parts for home in holders).values())
    meeting = -(-len(parts) // most)
    return meeting + len(readers) - 2 + all(readers.isdisjoint(holders) for holders in parts)
