"""Fill: in which programs, slices and buckets the tensors of a bundle travel.

All of it follows from names, sizes and layouts. So every rank derives the same batches alone.

Tensors that the same ranks send to the same ranks are a *class*. The classes take turns, so that
after any part of the order every class has sent about that part of its bytes. A port carries the
sum of some classes, so it is used evenly from beginning to end (docs/many.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from rvdcomm.plans.member import Member, Way
from rvdcomm.program.join import Unit

_T = TypeVar("_T")

BATCH_BYTES = 256 << 20
"""Shards that a rank gets and gives in one program, about; a program takes time to compile."""

BUCKETS_OF_BATCH = 16
"""A program has more shards than that if buckets are large: its first and last run alone."""

OPEN_BUCKETS = 4
"""A unit goes to the first of so many buckets in which all its ranks have room. With one, a rank
without room would close the bucket of all others; with more, looking takes longer than it gains."""

NUM_SLICES = (1, 2, 4, 8, 16, 32, 64)
"""Into how many slices a tensor is cut whose staging is larger than a bucket."""


@dataclass(frozen=True)
class Batch:
    """Tensors of one staging dtype that one program moves.

    Attributes:
        members: their numbers in the bundle.
        num_slices: of every one of them.
        buckets: units that travel together; a unit's tensor is a place in ``members``.
        staging_bound: at least the staging that any rank needs for all buckets alive at once.
    """

    members: tuple[int, ...]
    num_slices: tuple[int, ...]
    buckets: tuple[tuple[Unit, ...], ...]
    staging_bound: int


def filled(members: Sequence[Member], share: int) -> tuple[Batch, ...]:
    """All members, in buckets that together fill ``share`` bytes of staging of a rank.

    A unit that needs more, even as one of many slices, is in a bucket where its ranks have nothing
    else.
    """
    known: dict[tuple[Way, int], tuple[int, int, dict[int, int]]] = {}
    return tuple(_batch(members, batch, share, known) for batch in _batches(members, share))


def _batch(
    members: Sequence[Member],
    batch: tuple[int, ...],
    share: int,
    known: dict[tuple[Way, int], tuple[int, int, dict[int, int]]],
) -> Batch:
    """``known`` holds what was found for tensors that are alike."""
    ways = [members[i].way for i in batch]
    # A bucket begins a phase after the one before it, so that many are alive at once.
    depth = max(way.num_phases for way in ways)
    cap = share // depth
    num_slices: list[int] = []
    staging: dict[Unit, Mapping[int, int]] = {}
    for t, way in enumerate(ways):
        if (way, cap) not in known:
            known[way, cap] = _fitting(way, cap)
        count, num_lanes, sizes = known[way, cap]
        num_slices.append(count)
        staging |= {(t, lane): sizes for lane in range(num_lanes)}
    buckets, fullest = _buckets(in_turn(list(staging), lambda unit: ways[unit[0]]), staging, cap)
    return Batch(batch, tuple(num_slices), buckets, fullest * min(depth, len(buckets)))


def _fitting(way: Way, cap: int) -> tuple[int, int, dict[int, int]]:
    """The fewest slices whose staging fits, the lanes that they make, and a lane's staging."""
    for num_slices in NUM_SLICES:
        sizes = way.staging_bound(num_slices)
        if max(sizes.values(), default=0) <= cap:
            break
    return num_slices, way.num_lanes(num_slices), sizes


def in_turn(items: Sequence[_T], way_of: Callable[[_T], Way]) -> list[_T]:
    """Items in an order in which all classes send all the time; those of a class keep theirs.

    An item's place is the middle of what it has of the bytes of its class, 0 being their beginning
    and 1 their end.

    Law (tests/plans/test_fill.py): a class has sent, before any place, that share of its bytes,
    give or take half an item.
    """
    classes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    known: dict[Way, int] = {}
    total: list[int] = []
    middles = []
    for item in items:
        way = way_of(item)
        if way not in known:
            ends = way.transition.src.ranks, way.transition.dst.ranks
            known[way] = classes.setdefault(ends, len(classes))
            total += [0] * (len(classes) - len(total))
        # Empty tensors have a place too.
        size = prod(way.transition.src.shape) + 1
        total[known[way]] += size
        middles.append((total[known[way]] - size / 2, known[way]))
    places = [middle / total[one] for middle, one in middles]
    return [items[i] for i in sorted(range(len(items)), key=places.__getitem__)]


def _buckets(
    units: Iterable[Unit], staging: Mapping[Unit, Mapping[int, int]], cap: int
) -> tuple[tuple[tuple[Unit, ...], ...], int]:
    """Units in buckets of which no rank stages more than ``cap``; and the most that one stages.

    A unit that needs more is in a bucket in which its ranks have nothing else.
    """
    buckets: list[list[Unit]] = []
    staged: list[dict[int, int]] = []
    for unit in units:
        sizes = staging[unit]
        for i in range(max(0, len(buckets) - OPEN_BUCKETS), len(buckets)):
            held = staged[i]
            if not any(rank in held and held[rank] + size > cap for rank, size in sizes.items()):
                break
        else:
            i = len(buckets)
            buckets.append([])
            staged.append({})
        buckets[i].append(unit)
        for rank, size in sizes.items():
            staged[i][rank] = staged[i].get(rank, 0) + size
    fullest = max((size for held in staged for size in held.values()), default=0)
    return tuple(map(tuple, buckets)), fullest


def _batches(members: Sequence[Member], share: int) -> Iterator[tuple[int, ...]]:
    """Members of one staging dtype each; the shards of no rank are more than a batch's."""
    most = max(BATCH_BYTES, BUCKETS_OF_BATCH * share)
    by_dtype: dict[str, list[int]] = {}
    for i, member in enumerate(members):
        by_dtype.setdefault(member.way.dtype, []).append(i)
    for alike in by_dtype.values():
        batch: list[int] = []
        sizes: dict[int, int] = {}
        for i in in_turn(alike, lambda i: members[i].way):
            added = members[i].way.shard_bounds
            if batch and any(sizes.get(rank, 0) + size > most for rank, size in added):
                yield tuple(batch)
                batch, sizes = [], {}
            batch.append(i)
            for rank, size in added:
                sizes[rank] = sizes.get(rank, 0) + size
        yield tuple(batch)
