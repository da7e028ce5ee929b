"""Bundle: the plan of many tensors that travel in one call.

Every tensor gets its own path, found once a pair of layouts. Tensors go in *batches*, a program
each, and in every program in buckets, whose collectives are joined (``lower/join.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.cost import Cost, StepCost, total_cost
from rvdcomm.errors import MemoryLimitError
from rvdcomm.layout import Topology
from rvdcomm.plans import table
from rvdcomm.plans.fill import batches, joined
from rvdcomm.plans.member import Member
from rvdcomm.plans.planner import Plan, program_step_costs
from rvdcomm.program import Program, Transition
from rvdcomm.program.lower import Lanes, lanes
from rvdcomm.program.traffic import Islands
from rvdcomm.program.verify import verify

BUCKET_BYTES = 32 << 20
"""Staging of a bucket, unless a limit is lower: its messages are long then, and it goes round."""

NEAR_BUCKET_BYTES = 4 << 20
"""The same where all ranks read from each other: it should still be in the caches then."""

MAX_RETREAT = 16
"""Buckets are made smaller until staging, with its gaps, fits a limit; to this part of it."""


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

    def lowered(self, islands: Islands) -> tuple[Batch, ...]:
        """What is run where the ranks of each island can map each other's memory.

        Raises:
            MemoryLimitError: a rank would need more staging than ``memory_limit``.
        """
        return tuple(Batch(batch, self._program(batch, islands)) for batch in batches(self.members))

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
        for batch in self.batches:
            verify(batch.program)

    def __str__(self) -> str:
        return "\n".join([*table.rows(self), *table.totals(self)])

    # --- programs -------------------------------------------------------------------------------

    def _program(self, members: Sequence[int], islands: Islands) -> Program:
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
            program = joined(chosen, share, lowered)
            staging = max(program.arena(rank).num_bytes for rank in program.ranks)
            if self.memory_limit is None or staging <= self.memory_limit:
                return program
            if share <= bucket // MAX_RETREAT:
                raise MemoryLimitError(
                    f"redistribute_many of {len(chosen)} tensors: memory_limit={self.memory_limit} "
                    f"bytes of staging a rank, but the least that was found is {staging}."
                )
            share = share * 2 // 3
