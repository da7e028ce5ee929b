"""Probes: the transfers whose times determine a level's link, as plans.

All groups of a level work at once, as they do in a plan. Inside the groups of the innermost level
every rank sends to every other. Between two groups every rank of one sends to ranks of the other,
so that the shared port is busy. A probe crosses the ports of its level and of the levels below.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise
from math import inf

from rvdcomm import Layout, Level, Link, Plan, Topology, plan

DTYPE, ITEM_BYTES = "float32", 4

Ranks = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ProbeKind:
    """A transfer by the RVDs of its ends; ``{k}`` stands for the number of ranks of an end."""

    name: str
    src: str
    dst: str


INSIDE = (
    ProbeKind("all_to_all", "R(1)V(1)D({k},1)", "R(1)V(1)D(1,{k})"),
    ProbeKind("all_gather", "R(1)V(1)D({k},1)", "R({k})V(1)D(1,1)"),
    ProbeKind("reduce_scatter", "R(1)V({k})D(1,1)", "R(1)V(1)D({k},1)"),
)
"""Transfers inside one group."""

SWAP = ProbeKind("swap", "R(1)V(1)D({k},1)", "R(1)V(1)D({k},1)")
TRANSFER = ProbeKind("transfer", "R(1)V(1)D({k},1)", "R(1)V(1)D(1,{k})")
"""Transfers between two groups: each rank swaps data with one rank of the other group, or every
rank of one group sends to every rank of the other."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A kind of transfer that sets of ranks run at once; a set is (src ranks, dst ranks)."""

    level: int
    kind: ProbeKind
    ends: tuple[tuple[Ranks, Ranks], ...]

    def plan(self, i: int, num_bytes: int, topology: Topology) -> Plan:
        """The plan that the ``i``-th set runs, for a tensor of about ``num_bytes``."""
        src_ranks, dst_ranks = self.ends[i]
        side = len(src_ranks) * max(1, round((num_bytes / ITEM_BYTES) ** 0.5 / len(src_ranks)))
        src, dst = (
            Layout((side, side), text.format(k=len(ranks)), ranks)
            for text, ranks in ((self.kind.src, src_ranks), (self.kind.dst, dst_ranks))
        )
        return plan(src, dst, DTYPE, topology, executor="dist")

    def place_of(self, rank: int) -> int | None:
        """The index of the set that a rank is in; None if it is in none."""
        found = (i for i, ends in enumerate(self.ends) if rank in ends[0] or rank in ends[1])
        return next(found, None)


def probes(topology: Topology) -> Iterator[Probe]:
    """All probes of a topology's levels; its links do not matter."""
    ranks = [group[0] for group in topology.levels[0].groups]
    outer = [level.groups for level in topology.levels[1:]] + [(tuple(sorted(ranks)),)]
    for kind in INSIDE:
        yield Probe(0, kind, tuple((group, group) for group in outer[0] if len(group) > 1))
    for index, (groups, parents) in enumerate(pairwise(outer), start=1):
        pairs = [pair for parent in parents for pair in _neighbours(groups, parent)]
        yield Probe(index, SWAP, tuple((a + b, b + a) for a, b in pairs))
        yield Probe(index, TRANSFER, tuple(pairs))


def transfers(level: int, pairs: Iterable[tuple[Ranks, Ranks]]) -> Probe:
    """Transfers from the first host to the second of disjoint pairs, all at once."""
    return Probe(level, TRANSFER, tuple(_equally_many(a, b) for a, b in pairs))


def _neighbours(groups: tuple[Ranks, ...], parent: Ranks) -> Iterator[tuple[Ranks, Ranks]]:
    """Disjoint pairs of the groups in one parent, each cut to equally many ranks."""
    inside = [group for group in groups if group[0] in parent]
    for a, b in zip(inside[::2], inside[1::2], strict=False):
        yield _equally_many(a, b)


def _equally_many(a: Ranks, b: Ranks) -> tuple[Ranks, Ranks]:
    size = min(len(a), len(b))
    return a[:size], b[:size]


def rounds_and_port_bytes(made: Plan, level: int) -> tuple[int, int]:
    """Rounds and bytes of one level: factors of alpha and of 1 / beta in the cost model."""
    free, counting = Link(0.0, inf), Link(0.0, 1.0)
    levels = tuple(
        Level(of.name, of.groups, counting if i == level else free)
        for i, of in enumerate(made.topology.levels)
    )
    costs = replace(made, topology=Topology(levels)).step_costs
    return sum(cost.rounds for cost in costs), round(sum(cost.secs for cost in costs))
