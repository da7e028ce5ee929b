"""Forest: trees of messages that serve demands, each a share of its elements."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from rvdcomm.cost.demands import Demand
from rvdcomm.errors import LayoutError
from rvdcomm.network import Wire

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

    def beats(self) -> tuple[dict[Pair, int], dict[Pair, int]]:
        """When each hop of ``sums`` and of ``copies`` starts, if each takes one beat.

        A rank sends on once all that it waits for has come.
        """
        inward: dict[int, list[int]] = {}
        for hop in self.sums:
            inward.setdefault(hop.dst, []).append(hop.src)
        ready: dict[int, int] = {}

        def ready_at(rank: int) -> int:
            if rank not in ready:
                ready[rank] = max((1 + ready_at(a) for a in inward.get(rank, ())), default=0)
            return ready[rank]

        sums = {(hop.src, hop.dst): ready_at(hop.src) for hop in self.sums}
        has = {self.root: ready_at(self.root)}
        left = list(self.copies)
        while left:
            has |= {hop.dst: has[hop.src] + 1 for hop in left if hop.src in has}
            left = [hop for hop in left if hop.dst not in has]
        return sums, {(hop.src, hop.dst): has[hop.src] for hop in self.copies}

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


Way = tuple[Tree, ...]
"""Trees that together serve all readers of a demand."""


def faults_of(way: Way, demand: Demand) -> list[str]:
    """What is wrong with a way; empty if it serves the demand."""
    served = {rank for rank in demand.readers if demand.is_served(rank)}
    reached = served.union(*(tree.reached() for tree in way))
    return [
        *(fault for tree in way for fault in tree.faults(demand)),
        *(f"rank {rank} gets nothing" for rank in sorted(demand.readers - reached)),
    ]


def loads_of(way: Way) -> Counter[int]:
    """How often an element passes each wire."""
    return Counter(wire for tree in way for hop in (*tree.sums, *tree.copies) for wire in hop.wires)


@dataclass(frozen=True)
class Forest:
    """Ways for every demand, each with the share of the demand's elements that goes so.

    Attributes:
        demands: what is served.
        ways: for each demand, its ways and their shares, which add up to 1.
        wires: the wires that hops pass.
        least_secs: no ways take less time, by the dual of the linear program; a byte an element,
            latencies aside. 0 where the cheapest trees are not exact.
    """

    demands: tuple[Demand, ...]
    ways: tuple[tuple[tuple[Way, Fraction], ...], ...]
    wires: tuple[Wire, ...]
    least_secs: float = 0.0

    def to_json(self) -> list[Any]:
        """The ways and shares as plain values, in the order of the demands."""
        return [
            [[*share.as_integer_ratio(), [tree.to_json() for tree in way]] for way, share in each]
            for each in self.ways
        ]

    def with_ways(self, values: Any) -> Forest:
        """The forest with the ways that ``to_json`` of another one gave.

        Raises:
            LayoutError: they do not serve these demands.
        """
        try:
            ways = tuple(
                tuple((tuple(map(Tree.from_json, way)), Fraction(a, b)) for a, b, way in each)
                for each in values
            )
            made = replace(self, ways=ways)
            faults = made.faults()
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise LayoutError(f"trees of another rank cannot be read: {error}.") from None
        if faults:
            raise LayoutError(f"trees of another rank do not serve this call: {faults[0]}.")
        return made

    @cached_property
    def num_beats(self) -> int:
        """Beats of the deepest tree."""
        trees = (tree for ways in self.ways for way, _ in ways for tree in way)
        beats = (beat for tree in trees for side in tree.beats() for beat in side.values())
        return 1 + max(beats, default=-1)

    def beat_secs(self, num_slices: int) -> list[float]:
        """How long the busiest wire takes in each beat, if slices follow each other, a beat apart.

        A byte an element, latencies aside.
        """
        rates = np.array([wire.link.bytes_per_sec for wire in self.wires])
        loads = np.zeros((self.num_beats + num_slices - 1, len(self.wires)))
        for demand, ways in zip(self.demands, self.ways, strict=True):
            for way, share in ways:
                num = float(share) * demand.num_elements / num_slices
                for tree in way:
                    for hops, beats in zip((tree.sums, tree.copies), tree.beats(), strict=True):
                        for hop in hops:
                            first = beats[hop.src, hop.dst]
                            loads[first : first + num_slices, list(hop.wires)] += num
        return [float(secs) for secs in (loads / rates).max(axis=1)]

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
        found = []
        for demand, ways in zip(self.demands, self.ways, strict=True):
            found += [fault for way, _ in ways for fault in faults_of(way, demand)]
            if sum(share for _, share in ways) != 1 or any(share <= 0 for _, share in ways):
                found.append(f"shares of {demand} are {[str(share) for _, share in ways]}")
        return found
