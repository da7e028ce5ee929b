"""Forest: trees of messages that serve demands, each a share of its elements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from fractions import Fraction
from functools import cached_property
from itertools import pairwise
from typing import Any

from rvdcomm.cost.demands import Demand, in_units
from rvdcomm.errors import LayoutError
from rvdcomm.network import Wire, alpha_secs_along
from rvdcomm.synthesis.turns import Sides, in_turn
from rvdcomm.text import quoted

Pair = tuple[int, int]
"""The ranks of a hop: from, to."""


@dataclass(frozen=True, slots=True)
class Hop:
    """A message from a rank to another; ``wires`` are those that it passes, by their indices."""

    src: int
    dst: int
    wires: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Tree:
    """Hops that bring elements to some of the ranks that need them.

    All parts of an element meet at ``root``, over ``sums``; from there the element goes on, over
    ``copies``. Elements of one part start at a rank that has them.
    """

    root: int
    sums: tuple[Hop, ...]
    copies: tuple[Hop, ...]

    def reached(self) -> set[int]:
        """The ranks that have the element in the end."""
        return {self.root, *(hop.dst for hop in self.copies)}

    def beats(
        self, start: Callable[[Hop, int, bool], int]
    ) -> tuple[dict[Pair, int], dict[Pair, int]]:
        """When each hop of ``sums`` and of ``copies`` starts; each takes one beat.

        A rank sends on once all that it waits for has come. ``start`` gives the beat in which a hop
        starts that could from some beat on; its last argument is whether it is one of ``sums``.
        """
        inward: dict[int, list[Hop]] = {}
        for hop in self.sums:
            inward.setdefault(hop.dst, []).append(hop)
        has: dict[int, int] = {}

        def ready_at(rank: int) -> int:
            if rank not in has:
                ends = (1 + start(hop, ready_at(hop.src), True) for hop in inward.get(rank, ()))
                has[rank] = max(ends, default=0)
            return has[rank]

        sums = {(hop.src, hop.dst): start(hop, ready_at(hop.src), True) for hop in self.sums}
        has = {self.root: ready_at(self.root)}
        copies: dict[Pair, int] = {}
        left = list(self.copies)
        while left:
            for hop in [hop for hop in left if hop.src in has]:
                copies[hop.src, hop.dst] = start(hop, has[hop.src], False)
                has[hop.dst] = copies[hop.src, hop.dst] + 1
            left = [hop for hop in left if hop.dst not in has]
        return sums, copies

    def to_json(self) -> list[Any]:
        """The tree as plain values, which ``from_json`` reads."""
        sides = ([[h.src, h.dst, list(h.wires)] for h in hops] for hops in (self.sums, self.copies))
        return [self.root, *sides]

    @classmethod
    def from_json(cls, values: Any) -> Tree:
        """The tree of plain values."""
        root, *sides = values
        sums, copies = (
            tuple(Hop(int(a), int(b), tuple(map(int, wires))) for a, b, wires in side)
            for side in sides
        )
        return cls(int(root), sums, copies)

    def faults(self, demand: Demand) -> list[str]:
        """What is wrong with the tree, whichever readers it is for; empty if nothing is.

        Each rank of ``sums`` sends once, towards the root. Each hop of ``copies`` starts where the
        element is, and no rank gets it twice.
        """
        leads = {hop.src: hop.dst for hop in self.sums}
        found = [] if len(leads) == len(self.sums) else ["a rank sends its sum twice"]
        taken = {*leads, self.root}
        for rank in sorted(taken):
            at, passed = rank, 0
            while at != self.root and at in leads and passed <= len(leads):
                at, passed = leads[at], passed + 1
            if at != self.root or self.root in leads:
                found.append(f"what rank {rank} sends does not stay at the root {self.root}")
        found += [
            f"no rank sends part {i}"
            for i, holders in enumerate(demand.parts)
            if holders.isdisjoint(taken)
        ]
        has, left = {self.root}, list(self.copies)
        while ready := [hop for hop in left if hop.src in has]:
            has |= {hop.dst for hop in ready}
            left = [hop for hop in left if hop not in ready]
        found += [f"rank {hop.src} sends what it does not have" for hop in left]
        if len(self.reached()) != len(self.copies) + 1:
            found.append("a rank gets the element twice")
        return found


def unserved(demands: Iterable[Demand]) -> tuple[Demand, ...]:
    """The demands of which some reader lacks a part at the start."""
    return tuple(d for d in demands if not all(map(d.is_served, d.readers)))


Way = tuple[Tree, ...]
"""Trees that together serve all readers of a demand."""


def faults_of(way: Way, demand: Demand) -> list[str]:
    """What is wrong with a way; empty if it serves the demand."""
    served = Counter(rank for rank in demand.readers if demand.is_served(rank))
    roots = (tree.root for tree in way if not demand.is_served(tree.root))
    got = served + Counter([*roots, *(hop.dst for tree in way for hop in tree.copies)])
    return [
        *(fault for tree in way for fault in tree.faults(demand)),
        *(f"rank {rank} gets nothing" for rank in sorted(demand.readers - got.keys())),
        *(f"rank {rank} gets it twice" for rank in sorted(demand.readers) if got[rank] > 1),
    ]


def loads_of(way: Way) -> Counter[int]:
    """How often an element passes each wire."""
    return Counter(wire for tree in way for hop in (*tree.sums, *tree.copies) for wire in hop.wires)


PACES = ("together", "apart", "doubling", "in turn")
"""``together``: a hop runs as soon as its rank has the element. ``apart``: hops of unequal
latencies run in beats of their own, which take turns, the nearest first; so few far messages do not
wait for many near ones as if all were far. ``doubling``: hops take turns by how far they go around
the circle of ranks, so that a rank has one partner at a time. ``in turn``: so for any trees, by
list scheduling (``turns.py``); slices do not overlap."""


@dataclass(frozen=True)
class Forest:
    """Ways for every demand, each with the share of the demand's elements that goes so.

    Attributes:
        demands: what is served.
        ways: for each demand, its ways and their shares, which add up to 1.
        wires: the wires that hops pass.
        pace: which hops may run in which beats, one of ``PACES``.
        least: for each demand, seconds an element, by the dual of the linear program
            (``least_secs``); empty where the cheapest trees are not exact.
        pattern: a forest with the same ways, of which this one is a multiple, nearly if shards are
            uneven; what takes long is computed there, once for all sizes.
        unit: the elements of a demand for each that the pattern has.
    """

    demands: tuple[Demand, ...]
    ways: tuple[tuple[tuple[Way, Fraction], ...], ...]
    wires: tuple[Wire, ...]
    least: tuple[float, ...] = ()
    pace: str = "together"
    pattern: Forest | None = field(default=None, compare=False, repr=False)
    unit: float = field(default=1.0, compare=False, repr=False)

    @cached_property
    def _hash(self) -> int:
        return hash((self.demands, self.ways, self.wires, self.pace))

    def __hash__(self) -> int:
        return self._hash

    def __getstate__(self) -> dict[str, object]:
        # Another process hashes texts differently, so cached hashes must not travel.
        return {each.name: getattr(self, each.name) for each in fields(self)}

    def sized(self, demands: tuple[Demand, ...], order: Sequence[int], unit: float) -> Forest:
        """The forest for ``unit`` times as many elements, as ``pattern`` has it.

        Args:
            demands: those of the new forest.
            order: for each demand of this forest, its place among them.
            unit: as the attribute.
        """
        place = {whole: i for i, whole in enumerate(order)}
        ways = tuple(self.ways[place[i]] for i in range(len(demands)))
        least = tuple(self.least[place[i]] for i in range(len(self.least)))
        return replace(self, demands=demands, ways=ways, least=least, pattern=self, unit=unit)

    @property
    def least_secs(self) -> float:
        """No ways take less time, a byte an element and latencies aside; 0 if nobody knows.

        The prices of wires that prove it do not depend on the sizes of demands.
        """
        pairs = zip(self.least, self.demands, strict=False)
        return sum(secs * demand.num_elements for secs, demand in pairs)

    def to_json(self) -> dict[str, Any]:
        """The ways and shares as plain values, in the order of the demands."""
        ways = [
            [[*share.as_integer_ratio(), [tree.to_json() for tree in way]] for way, share in each]
            for each in self.ways
        ]
        return {"pace": self.pace, "ways": ways}

    def with_ways(self, values: Any) -> Forest:
        """The forest with the ways that ``to_json`` of another one gave.

        Raises:
            LayoutError: they do not serve these demands.
        """
        try:
            ways = tuple(
                tuple((tuple(map(Tree.from_json, way)), Fraction(a, b)) for a, b, way in each)
                for each in values["ways"]
            )
            made = replace(self, ways=ways, pace=values["pace"])
            faults = made.faults()
        except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
            raise LayoutError(f"the trees cannot be read: {error}.") from None
        if faults:
            raise LayoutError(f"the trees do not serve this call: {faults[0]}.")
        # As if they were found here, so that all times are the same.
        unit, alike, order = in_units(made.demands)
        pattern = replace(made, demands=alike, ways=tuple(made.ways[i] for i in order))
        return pattern.sized(made.demands, order, unit)

    # --- beats ----------------------------------------------------------------------------------

    def alpha_secs(self, hop: Hop) -> float:
        """The latency of a message along a hop."""
        return alpha_secs_along(self.wires[wire] for wire in hop.wires)

    @cached_property
    def num_turns(self) -> int:
        """Beats from a slice to the next one: as many as there are turns."""
        if self.pace == "apart":
            return max(1, len(self._latencies))
        if self.pace == "in turn":
            return max(1, self.num_beats)
        return max(1, (len(self._place) - 1).bit_length()) if self.pace == "doubling" else 1

    @cached_property
    def _latencies(self) -> dict[float, int]:
        """The turn of hops of each latency."""
        hops = (hop for tree in self.trees for hop in (*tree.sums, *tree.copies))
        return {alpha: i for i, alpha in enumerate(sorted(set(map(self.alpha_secs, hops))))}

    @cached_property
    def _place(self) -> dict[int, int]:
        """The place of each rank on the circle of all."""
        ranks = {rank for demand in self.demands for rank in demand.readers.union(*demand.parts)}
        return {rank: i for i, rank in enumerate(sorted(ranks))}

    def _turn(self, hop: Hop, is_sum: bool) -> int:
        if self.pace == "apart":
            return self._latencies[self.alpha_secs(hop)]
        if self.pace == "together":
            return 0
        a, b = self._place[hop.src], self._place[hop.dst]
        # Copies go 1, 2, 4, ... places on, and sums as far back, the longest way first.
        steps = ((a - b if is_sum else b - a) % len(self._place)).bit_length() - 1
        return self.num_turns - 1 - steps if is_sum else steps

    def beats(self, tree: Tree) -> tuple[dict[Pair, int], dict[Pair, int]]:
        """When the hops of the first slice of a tree start: those of sums, and of copies."""
        if self.pace == "in turn":
            return self._in_turn[tree]

        def start(hop: Hop, ready: int, is_sum: bool) -> int:
            return ready + (self._turn(hop, is_sum) - ready) % self.num_turns

        return tree.beats(start)

    @cached_property
    def _in_turn(self) -> dict[Tree, Sides]:
        return in_turn(self.trees)

    @cached_property
    def num_beats(self) -> int:
        """Beats of the tree that takes most."""
        beats = (beat for tree in self.trees for side in self.beats(tree) for beat in side.values())
        return 1 + max(beats, default=-1)

    def num_beats_in(self, num_slices: int) -> int:
        """Beats of all slices, each of which starts ``num_turns`` after the one before."""
        return self.num_beats + (num_slices - 1) * self.num_turns if self.num_beats else 0

    # --- loads ----------------------------------------------------------------------------------

    @property
    def trees(self) -> Iterator[Tree]:
        """All trees of all ways."""
        return (tree for ways in self.ways for way, _ in ways for tree in way)

    @cached_property
    def through(self) -> Mapping[int, Fraction]:
        """Elements through each wire that is used."""
        found: dict[int, Fraction] = {}
        for demand, ways in zip(self.demands, self.ways, strict=True):
            for way, share in ways:
                for wire, count in loads_of(way).items():
                    found[wire] = found.get(wire, Fraction()) + count * share * demand.num_elements
        return found

    @cached_property
    def secs(self) -> float:
        """Seconds of the busiest wire, if an element is a byte."""
        return max(
            (float(n) / self.wires[i].link.bytes_per_sec for i, n in self.through.items()),
            default=0.0,
        )

    def faults(self) -> list[str]:
        """What is wrong with the ways, and shares that do not add up; empty if nothing is."""
        found = [] if self.pace in PACES else [f"pace {quoted(self.pace)} is unknown"]
        for demand, ways in zip(self.demands, self.ways, strict=True):
            found += [fault for way, _ in ways for fault in faults_of(way, demand)]
            if sum(share for _, share in ways) != 1 or any(share <= 0 for _, share in ways):
                found.append(f"shares of {demand} are {[str(share) for _, share in ways]}")
        hops = {hop for tree in self.trees for hop in (*tree.sums, *tree.copies)}
        found += [
            f"wires {list(hop.wires)} do not lead from rank {hop.src} to rank {hop.dst}"
            for hop in hops
            if not self._leads(hop)
        ]
        return found

    def _leads(self, hop: Hop) -> bool:
        """Whether the wires of a hop lead from its rank to the other."""
        if not hop.wires or not 0 <= min(hop.wires) <= max(hop.wires) < len(self.wires):
            return False
        mine = [self.wires[i] for i in hop.wires]
        nodes = [mine[0].src, *(wire.dst for wire in mine)]
        return all(a.dst == b.src for a, b in pairwise(mine)) and (nodes[0], nodes[-1]) == (
            hop.src,
            hop.dst,
        )
