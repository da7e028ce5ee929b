"""Fill: divide the tensors of a bundle into programs, slices and buckets.

The division follows from names, sizes and layouts alone, so every rank derives the same division.

Tensors that the same ranks send to the same ranks are a *class*. The classes take turns, so that
after any fraction of the order every class has sent about that fraction of its bytes. A port
carries the sum of some classes, so it is used evenly from beginning to end (docs/many.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import TypeVar

from rvdcomm.plans.member import Member, TensorPlan
from rvdcomm.program.join import Unit

_T = TypeVar("_T")

BATCH_BYTES = 256 << 20
"""A limit on a rank's shard bytes in one program; larger programs take longer to compile."""

BUCKETS_OF_BATCH = 16
"""If buckets are large, a program may hold 16 times their bytes: few buckets would overlap less."""

OPEN_BUCKETS = 4
"""A unit goes to the first of the last ``OPEN_BUCKETS`` buckets in which all its ranks have room.
With one open bucket, a single rank without room would close the bucket for all others. With more,
the search costs more than it gains."""

SLICE_COUNTS = (1, 2, 4, 8, 16, 32, 64)
"""Numbers of slices for a tensor whose staging is larger than a bucket."""


@dataclass(frozen=True)
class BundleBatch:
    """Tensors of one staging dtype that one program moves.

    Attributes:
        members: indices of the tensors in the bundle.
        num_slices: the number of slices of each tensor.
        buckets: units that are sent together; a unit's tensor is an index into ``members``.
        staging_bound: an upper bound on the staging bytes that a rank needs at once.
    """

    members: tuple[int, ...]
    num_slices: tuple[int, ...]
    buckets: tuple[tuple[Unit, ...], ...]
    staging_bound: int


def filled(members: Sequence[Member], share: int) -> tuple[BundleBatch, ...]:
    """Batches of all members, whose buckets stage at most ``share`` bytes per rank at once.

    If a unit needs more, even with the most slices, its ranks stage nothing else in its bucket.
    """
    known: dict[tuple[TensorPlan, int], tuple[int, int, dict[int, int]]] = {}
    return tuple(_batch(members, batch, share, known) for batch in _batches(members, share))


def _batch(
    members: Sequence[Member],
    batch: tuple[int, ...],
    share: int,
    known: dict[tuple[TensorPlan, int], tuple[int, int, dict[int, int]]],
) -> BundleBatch:
    """The batch of these members; ``known`` caches slices, lanes and staging by way."""
    tensor_plans = [members[i].tensor_plan for i in batch]
    # A bucket starts one phase after the bucket before it, so `depth` buckets are alive at once.
    depth = max(tensor_plan.num_phases for tensor_plan in tensor_plans)
    cap = share // depth
    num_slices: list[int] = []
    staging: dict[Unit, Mapping[int, int]] = {}
    for t, tensor_plan in enumerate(tensor_plans):
        if (tensor_plan, cap) not in known:
            known[tensor_plan, cap] = _fewest_slices(tensor_plan, cap)
        count, num_lanes, sizes = known[tensor_plan, cap]
        num_slices.append(count)
        staging |= {(t, lane): sizes for lane in range(num_lanes)}
    buckets, fullest = _buckets(
        in_turn(list(staging), lambda unit: tensor_plans[unit[0]]), staging, cap
    )
    return BundleBatch(batch, tuple(num_slices), buckets, fullest * min(depth, len(buckets)))


def _fewest_slices(tensor_plan: TensorPlan, cap: int) -> tuple[int, int, dict[int, int]]:
    """The fewest slices whose staging fits ``cap``, the number of lanes, and a lane's staging."""
    for num_slices in SLICE_COUNTS:
        sizes = tensor_plan.staging_bound(num_slices)
        if max(sizes.values(), default=0) <= cap:
            break
    return num_slices, tensor_plan.num_lanes(num_slices), sizes


def in_turn(items: Sequence[_T], tensor_plan_of: Callable[[_T], TensorPlan]) -> list[_T]:
    """Items in an order in which all classes send at an even rate; a class keeps its own order.

    The *place* of an item, from 0 to 1, is the position of its middle byte in the bytes of its
    class.

    Law (tests/plans/test_fill.py): before place x, a class has sent the share x of its bytes,
    within half an item.
    """
    classes: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
    known: dict[TensorPlan, int] = {}
    total: list[int] = []
    middles = []
    for item in items:
        tensor_plan = tensor_plan_of(item)
        if tensor_plan not in known:
            ends = tensor_plan.transition.src.ranks, tensor_plan.transition.dst.ranks
            known[tensor_plan] = classes.setdefault(ends, len(classes))
            total += [0] * (len(classes) - len(total))
        # Empty tensors have a place too.
        size = prod(tensor_plan.transition.src.shape) + 1
        total[known[tensor_plan]] += size
        middles.append((total[known[tensor_plan]] - size / 2, known[tensor_plan]))
    places = [middle / total[one] for middle, one in middles]
    return [items[i] for i in sorted(range(len(items)), key=places.__getitem__)]


def _buckets(
    units: Iterable[Unit], staging: Mapping[Unit, Mapping[int, int]], cap: int
) -> tuple[tuple[tuple[Unit, ...], ...], int]:
    """Buckets in which no rank stages more than ``cap`` bytes, and the most that a rank stages.

    If a unit needs more, its ranks stage nothing else in its bucket.
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
    """Members with one staging dtype per batch; no rank's shards exceed the size of a batch."""
    most = max(BATCH_BYTES, BUCKETS_OF_BATCH * share)
    by_dtype: dict[str, list[int]] = {}
    for i, member in enumerate(members):
        by_dtype.setdefault(member.tensor_plan.dtype, []).append(i)
    for alike in by_dtype.values():
        batch: list[int] = []
        sizes: dict[int, int] = {}
        for i in in_turn(alike, lambda i: members[i].tensor_plan):
            added = members[i].tensor_plan.shard_bounds
            if batch and any(sizes.get(rank, 0) + size > most for rank, size in added):
                yield tuple(batch)
                batch, sizes = [], {}
            batch.append(i)
            for rank, size in added:
                sizes[rank] = sizes.get(rank, 0) + size
        yield tuple(batch)
