"""Bundle: the plan of many tensors that travel in one call.

Every tensor gets its own path, found once a pair of layouts. Tensors go in *batches*, a program
each, and in every program in buckets, whose collectives are joined (``lower/join.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod

from rvdcomm.cost import Cost, StepCost, total_cost
from rvdcomm.dtypes import dtype_name
from rvdcomm.errors import LayoutError, MemoryLimitError
from rvdcomm.layout import Layout
from rvdcomm.link import Link
from rvdcomm.lower import Lanes, lanes, wire_dtype
from rvdcomm.lower.join import Unit, join
from rvdcomm.lower.share import Groups
from rvdcomm.planner import Plan, default_topology, plan, program_step_costs
from rvdcomm.program import Program, Transition
from rvdcomm.topology import Level, Topology
from rvdcomm.units import bytes_text, secs_text

JOIN_BYTES = 1 << 20
"""Tensors with larger messages keep their collectives: a round costs less than their bytes do."""

BUCKET_BYTES = 32 << 20
"""Staging of a bucket, unless a limit is lower: its messages are long then, and it goes round."""

NEAR_BUCKET_BYTES = 4 << 20
"""The same where all ranks read from each other: it should still be in the caches then."""

BATCH_BYTES = 256 << 20
"""Shards that a rank gets or gives in one program, about; a program takes time to compile."""

NUM_SLICES = (1, 2, 4, 8, 16, 32, 64)
"""Into how many slices a tensor is cut whose staging is larger than a bucket."""

MAX_RETREAT = 16
"""Buckets are made smaller until staging, with its gaps, fits a limit; to this part of it."""


@dataclass(frozen=True)
class Member:
    """One tensor of a bundle: what it is called on either side, its way, and its plan alone."""

    src_name: str
    name: str
    transition: Transition
    plan: Plan

    @property
    def is_small(self) -> bool:
        """Whether its messages are worth joining with those of others."""
        program = self.plan.program
        messages = (m for one in program.collectives for m in one.messages)
        largest = max((m.num_elements for m in messages), default=0)
        return largest * program.item_bytes <= JOIN_BYTES


@dataclass(frozen=True)
class Batch:
    """Tensors of one staging dtype that one program moves; ``members`` are their numbers."""

    members: tuple[int, ...]
    program: Program


@dataclass(frozen=True)
class Bundle:
    """The plan of many tensors: ``members`` in the order in which they were given.

    ``print`` shows bytes, steps, time and memory by tensor and in total.
    """

    members: tuple[Member, ...]
    topology: Topology
    memory_limit: int | None

    @cached_property
    def batches(self) -> tuple[Batch, ...]:
        """What is run where all ranks send messages."""
        return self.lowered(())

    def lowered(self, islands: Groups) -> tuple[Batch, ...]:
        """What is run where the ranks of each island can map each other's memory.

        Raises:
            MemoryLimitError: a rank would need more staging than ``memory_limit``.
        """
        return tuple(
            Batch(batch, self._program(batch, islands)) for batch in _batches(self.members)
        )

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        layouts = {layout for m in self.members for layout in (m.plan.src, m.plan.dst)}
        return tuple(sorted({rank for layout in layouts for rank in layout.ranks}))

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        """What the steps of all programs cost, one after another."""
        return tuple(
            cost
            for batch in self.batches
            for cost in program_step_costs(
                batch.program,
                1 + max((one.step for one in batch.program.collectives), default=0),
                self.topology,
            )
        )

    @cached_property
    def cost(self) -> Cost:
        """What the call costs; ``peak_bytes`` holds the shards of all tensors, and staging."""
        peak_bytes = max(self.shard_bytes(rank) + self.staging_bytes(rank) for rank in self.ranks)
        return total_cost(self.step_costs, peak_bytes)

    def shard_bytes(self, rank: int) -> int:
        """Bytes of all src and dst shards of ``rank``."""
        return sum(batch.program.shard_bytes(rank) for batch in self.batches)

    def staging_bytes(self, rank: int) -> int:
        """The most staging that ``rank`` needs at once."""
        return max(batch.program.arena(rank).num_bytes for batch in self.batches)

    def verify(self) -> None:
        """Prove every program right, or raise a ProgramError."""
        from rvdcomm.verify import verify

        for batch in self.batches:
            verify(batch.program)

    def __str__(self) -> str:
        return "\n".join([*_table(self), *_totals(self)])

    # --- programs -------------------------------------------------------------------------------

    def _program(self, members: Sequence[int], islands: Groups) -> Program:
        """One program for these members, whose staging stays below the limit."""
        cache: dict[tuple[Plan, Transition, int], Lanes] = {}

        def lowered(member: Member, num_slices: int) -> Lanes:
            key = member.plan, member.transition, num_slices
            if key not in cache:
                cache[key] = lanes(
                    member.plan.path,
                    member.transition,
                    self.topology,
                    islands=islands,
                    num_slices=num_slices,
                    staged=member.is_small,
                )
            return cache[key]

        chosen = [self.members[i] for i in members]
        is_near = any(set(self.ranks) <= set(island) for island in islands)
        share = bucket = NEAR_BUCKET_BYTES if is_near else BUCKET_BYTES
        if self.memory_limit is not None:
            share = bucket = min(bucket, self.memory_limit)
        while True:
            program = _joined(chosen, share, lowered)
            staging = max(program.arena(rank).num_bytes for rank in program.ranks)
            if self.memory_limit is None or staging <= self.memory_limit:
                return program
            if share < bucket // MAX_RETREAT:
                raise MemoryLimitError(
                    f"redistribute_many of {len(chosen)} tensors: memory_limit={self.memory_limit} "
                    f"bytes of staging a rank, but the least that was found is {staging}."
                )
            share = share * 2 // 3


def _joined(
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


def _batches(members: Sequence[Member]) -> Iterator[tuple[int, ...]]:
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


# --- planning -----------------------------------------------------------------------------------


def plan_many(
    src: Mapping[str, Layout],
    dst: Mapping[str, Layout],
    dtype: str | Mapping[str, str],
    *,
    dst_dtype: str | Mapping[str, str] | None = None,
    names: Callable[[str], str] | None = None,
    topology: Topology | None = None,
    memory_limit: int | None = None,
) -> Bundle:
    """Plan the transitions of many tensors as one call.

    Args:
        src, dst: the layouts of every tensor, by the names that it has on either side.
        dtype: of the tensors; one for all, or one a name of ``src``.
        dst_dtype: what they become; as they are if None, or where a mapping has no entry.
        names: the name in ``dst`` of a name in ``src``; the same if None.
        topology: as of ``plan``.
        memory_limit: bytes of staging, besides the shards, that no rank may exceed.

    Raises:
        LayoutError: names or shapes do not match, or a layout is illegal.
    """
    pairs = matched(src, dst, names)
    if topology is None:
        topology = default_topology(
            {rank for side in (src, dst) for layout in side.values() for rank in layout.ranks}
        )
    shared = _shared_alpha(topology, len(pairs))
    members = []
    for src_name, name in pairs:
        own = dtype_name(dtype[src_name] if isinstance(dtype, Mapping) else dtype)
        given = dst_dtype.get(name) if isinstance(dst_dtype, Mapping) else dst_dtype
        transition = Transition(src[src_name], dst[name], own, dtype_name(given or own))
        try:
            found = plan(transition.src, transition.dst, wire_dtype(transition), shared)
        except LayoutError as error:
            raise LayoutError(f"tensor {name!r}: {error}") from None
        members.append(Member(src_name, name, transition, found))
    return Bundle(tuple(members), topology, memory_limit)


def matched(
    src: Mapping[str, object], dst: Mapping[str, object], names: Callable[[str], str] | None
) -> list[tuple[str, str]]:
    """(name in src, name in dst) of every tensor, in the order of src.

    Raises:
        LayoutError: two tensors get one name, or some have no partner.
    """
    pairs = [(name, name if names is None else names(name)) for name in src]
    mapped = [name for _, name in pairs]
    if len(set(mapped)) < len(mapped):
        twice = next(name for name in mapped if mapped.count(name) > 1)
        both = [name for name, to in pairs if to == twice]
        raise LayoutError(f"redistribute_many: names maps {both} to one name, {twice!r}.")
    if set(mapped) != set(dst):
        odd = sorted(set(mapped) ^ set(dst))
        raise LayoutError(f"redistribute_many: src and dst differ in the names {odd[:5]}.")
    if not pairs:
        raise LayoutError("redistribute_many: there is no tensor.")
    return pairs


def _shared_alpha(topology: Topology, num_tensors: int) -> Topology:
    """The topology for a tensor of many: a round's latency is paid once for all of them."""
    return Topology(
        tuple(
            Level(
                level.name,
                level.groups,
                Link(level.link.alpha_secs / num_tensors, level.link.bytes_per_sec),
            )
            for level in topology.levels
        )
    )


# --- text ---------------------------------------------------------------------------------------


def _table(bundle: Bundle) -> Iterator[str]:
    width = min(max(len(member.name) for member in bundle.members), 24)
    widths = (9, 5, 8, 9)

    def row(name: str, text: str, figures: Sequence[str]) -> str:
        right = "".join(f"  {figure:>{w}}" for figure, w in zip(figures, widths, strict=True))
        return f"{name:<{width}}  {text:<34}{right}"

    yield row("tensor", "transition", ("sent", "steps", "time", "peak"))
    for member in bundle.members:
        cost, transition = member.plan.cost, member.transition
        text = f"{transition.src.rvd} -> {transition.dst.rvd}"
        figures = (
            bytes_text(cost.wire_bytes),
            str(len(member.plan.path.steps)),
            secs_text(cost.secs),
            bytes_text(cost.peak_bytes),
        )
        name = member.name if len(member.name) <= width else f"..{member.name[2 - width :]}"
        yield row(name, text, figures)


def _totals(bundle: Bundle) -> Iterator[str]:
    cost = bundle.cost
    staging = max(bundle.staging_bytes(rank) for rank in bundle.ranks)
    shards = max(bundle.shard_bytes(rank) for rank in bundle.ranks)
    num_calls = sum(len(batch.program.collectives) for batch in bundle.batches)
    alone = sum(len(member.plan.program.collectives) for member in bundle.members)
    ways = {(m.transition.src_dtype, m.transition.dst_dtype): None for m in bundle.members}
    dtypes = ", ".join(a if a == b else f"{a} -> {b}" for a, b in ways)
    yield (
        f"total  {len(bundle.members)} tensors ({dtypes}) on {len(bundle.ranks)} ranks: "
        f"{bytes_text(cost.wire_bytes)} sent ({bytes_text(cost.host_bytes)} between hosts)"
    )
    yield (
        f"       {num_calls} collectives ({alone} one by one) in {len(bundle.step_costs)} steps, "
        f"{secs_text(cost.secs)}"
    )
    yield (
        f"       peak {bytes_text(cost.peak_bytes)} a rank: shards {bytes_text(shards)}, "
        f"staging {bytes_text(staging)}"
    )
