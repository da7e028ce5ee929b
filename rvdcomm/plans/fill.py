"""Fill: which tensors share a program, and how they fill its buckets."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from rvdcomm.plans.member import Member
from rvdcomm.plans.planner import Plan
from rvdcomm.program import Program, Transition
from rvdcomm.program.join import Unit, join
from rvdcomm.program.lower import Lanes, wire_dtype

BATCH_BYTES = 256 << 20
"""Shards that a rank gets or gives in one program, about; a program takes time to compile."""

NUM_SLICES = (1, 2, 4, 8, 16, 32, 64)
"""Into how many slices a tensor is cut whose staging is larger than a bucket."""


def joined(
    members: Sequence[Member], limit: int, lowered: Callable[[Member, int], Lanes]
) -> Program:
    """The members' program with buckets that fill ``limit`` bytes where all phases are alive."""
    whole = [lowered(member, 1) for member in members]
    cap = limit // max(len(phases) for lanes in whole for phases in lanes.lanes)
    tensors: list[Lanes] = []
    staging: dict[Unit, dict[int, int]] = {}
    alike: dict[tuple[Plan, Transition], tuple[Lanes, dict[int, int]]] = {}
    for t, member in enumerate(members):
        kind = member.plan, member.transition
        if kind not in alike:
            alike[kind] = _fitting(member, cap, lowered)
        found, sizes = alike[kind]
        tensors.append(found)
        staging |= {(t, lane): sizes for lane in range(len(found.lanes))}
    return join(tensors, list(_buckets(_in_turn(members, staging), staging, cap)))


def _fitting(
    member: Member, cap: int, lowered: Callable[[Member, int], Lanes]
) -> tuple[Lanes, dict[int, int]]:
    """The member in as few slices as fit, and the staging of one of them by rank."""
    for num_slices in NUM_SLICES:
        found = lowered(member, num_slices)
        sizes = _staging(found)
        if max(sizes.values()) <= cap:
            break
    return found, sizes


def _staging(found: Lanes) -> dict[int, int]:
    """Bytes of staging of one lane, by rank."""
    instructions = tuple(one for phase in found.lanes[0] for one in phase)
    program = Program((found.transition,), found.dtype, found.buffers, instructions)
    return {rank: program.arena(rank).num_bytes for rank in program.ranks}


def _in_turn(members: Sequence[Member], units: Mapping[Unit, object]) -> list[Unit]:
    """Units in such an order that the ranks that have them all give, and take, all the time.

    Stages of a pipeline hold tensors of their own: theirs come in turn.
    """
    total: dict[tuple[int, ...], int] = {}
    placed = []
    num_lanes: dict[int, int] = {}
    for t, _ in units:
        num_lanes[t] = num_lanes.get(t, 0) + 1
    for t, lane in units:
        src = members[t].transition.src
        size = prod(src.shape) // num_lanes[t] + 1
        total[src.ranks] = total.get(src.ranks, 0) + size
        placed.append((total[src.ranks] - size / 2, src.ranks, (t, lane)))
    placed.sort(key=lambda x: x[0] / total[x[1]])
    return [unit for _, _, unit in placed]


def _buckets(
    units: Sequence[Unit], staging: Mapping[Unit, Mapping[int, int]], cap: int
) -> Iterator[list[Unit]]:
    """Runs of units of which no rank stages more than ``cap``, or single ones."""
    bucket: list[Unit] = []
    filled: dict[int, int] = {}
    for unit in units:
        sizes = staging[unit]
        if bucket and any(filled.get(rank, 0) + size > cap for rank, size in sizes.items()):
            yield bucket
            bucket, filled = [], {}
        bucket.append(unit)
        for rank, size in sizes.items():
            filled[rank] = filled.get(rank, 0) + size
    if bucket:
        yield bucket


def batches(members: Sequence[Member]) -> Iterator[tuple[int, ...]]:
    """Members of one staging dtype each, of about ``BATCH_BYTES`` a rank."""
    by_dtype: dict[str, list[int]] = {}
    for i, member in enumerate(members):
        by_dtype.setdefault(wire_dtype(member.transition), []).append(i)
    for found in by_dtype.values():
        batch: list[int] = []
        num_bytes = 0
        for i in found:
            size = members[i].plan.bound.peak_bytes
            if batch and num_bytes + size > BATCH_BYTES:
                yield tuple(batch)
                batch, num_bytes = [], 0
            batch.append(i)
            num_bytes += size
        yield tuple(batch)
