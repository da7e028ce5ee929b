"""Bundle: the plan of many tensors that are moved in one call (docs/many.md).

Every tensor has its own path, which is searched once for each pair of layouts. The tensors are
divided into *batches*, and each batch has one program. A program divides its tensors into buckets,
whose collectives are joined (``program/join.py``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from hashlib import sha256

from rvdcomm.collector import paused_collector
from rvdcomm.cost import Cost, StepCost, total_cost
from rvdcomm.errors import MemoryLimitError
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.network import Links, Network, Topology
from rvdcomm.plans.fill import BundleBatch, filled
from rvdcomm.plans.load import Load, Ports, beat_costs
from rvdcomm.plans.member import Member, TensorPlan, shard_sizes
from rvdcomm.plans.plan import domains_of, program_step_costs
from rvdcomm.plans.table import rows
from rvdcomm.program import DST, SRC, Program, SharedDomains
from rvdcomm.program.domains import together
from rvdcomm.program.interleave import Lanes
from rvdcomm.program.join import join
from rvdcomm.program.verify import Proof, verify
from rvdcomm.units import bytes_text, secs_text

BUCKET_BYTES = 32 << 20
"""Bytes of staging per rank, unless a limit is lower: messages are then limited by bandwidth."""

SHARE_OF_SHARDS = 128
"""Staging may take 1 / 128 of the shards' bytes if that is more: fewer slices, fewer messages."""

NEAR_BUCKET_BYTES = 4 << 20
"""Bytes of staging if all ranks read each other's memory: few enough to be still in the caches."""

MAX_RETREAT = 16
"""To fit a memory limit, buckets are made smaller, down to 1 / 16 of their size."""

MAX_COUNTED = 4096
"""Up to this product of tensors and ranks, costs are counted in programs; above, modelled."""


@dataclass(frozen=True)
class Bundle:
    """The plan of many tensors: ``members`` in the order in which they were given.

    ``near`` are groups of ranks that read each other's memory (shared-memory domains). If None,
    these are the ranks of each host, or no groups if ``executor`` is "dist". ``print`` shows bytes,
    steps, time and memory by tensor and in total.

    Law (tests/plans/test_bundle.py): ``program_of`` gives what ``programs``, lowered for all ranks,
    contain for the rank.
    """

    members: tuple[Member, ...]
    topology: Topology
    executor: str = "dist"
    near: SharedDomains | None = None
    memory_limit: int | None = None
    network: Network | None = None

    @property
    def links(self) -> Links:
        """What costs refer to: the network, or the topology if that says all."""
        return self.topology if self.network is None else self.network

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """All ranks that take part, ascending."""
        layouts = {layout for m in self.members for layout in (m.plan.src, m.plan.dst)}
        return tuple(sorted({rank for ranks in {x.ranks for x in layouts} for rank in ranks}))

    @cached_property
    def domains(self) -> SharedDomains:
        """The shared-memory domains of two or more ranks, which read each other's memory."""
        return domains_of(self.near, self.executor, self.topology, self.ranks)

    @cached_property
    def identity(self) -> str:
        """A digest that is equal on all ranks that run the same bundle."""
        digest = sha256(f"{self.links!r} near {self.domains}".encode())
        texts: dict[TensorPlan, str] = {}
        for member in self.members:
            if member.tensor_plan not in texts:
                texts[member.tensor_plan] = member.tensor_plan.identity
            digest.update(f"{member.name}: {texts[member.tensor_plan]}\n".encode())
        digest.update(repr(self.batches).encode())
        return digest.hexdigest()

    # --- programs -------------------------------------------------------------------------------

    @cached_property
    def batches(self) -> tuple[BundleBatch, ...]:
        """Which tensors share a program, and their buckets and slices: the same on every rank.

        Raises:
            MemoryLimitError: a rank would need more memory than ``memory_limit``.
        """
        found, least = self._fit
        if found is None:
            raise self._limit_error(least)
        return found

    @cached_property
    def _fit(self) -> tuple[tuple[BundleBatch, ...] | None, int]:
        """Batches that fit the memory limit, and their peak; or None, and the least peak tried.

        Batches fit if the bound on their staging fits; in small bundles the programs of all ranks
        must fit as well. If no batches fit by their bound, the programs alone decide.
        """
        shards = max(self._shard_bytes.values())
        share = max(BUCKET_BYTES, shards // SHARE_OF_SHARDS)
        if self.domains == (self.ranks,):
            share = NEAR_BUCKET_BYTES
        if self.memory_limit is None:
            return filled(self.members, share), 0
        share = max(min(share, self.memory_limit - shards), 1)
        peaks = []
        for has_bound in (True, False):
            for made in self._ever_smaller(share):
                peaks.append(shards + max(batch.staging_bound for batch in made))
                # The bound ignores holes between buffers, so small bundles measure their programs.
                if not has_bound or (self.is_counted and peaks[-1] <= self.memory_limit):
                    peaks[-1] = self._peak_bytes(self._joined(made, None))
                if peaks[-1] <= self.memory_limit:
                    return made, peaks[-1]
        return None, min(peaks)

    def _limit_error(self, least: int) -> MemoryLimitError:
        return MemoryLimitError(
            f"redistribute_many of {len(self.members)} tensors: memory_limit={self.memory_limit} "
            f"bytes per rank, but the least that was found is {least}; the src and dst shards "
            f"alone are {max(self._shard_bytes.values())}."
        )

    def _ever_smaller(self, share: int) -> Iterator[tuple[BundleBatch, ...]]:
        last = share // MAX_RETREAT
        while share > last:
            yield filled(self.members, share)
            share = share * 2 // 3

    @cached_property
    def programs(self) -> tuple[Program, ...]:
        """The programs of all ranks, one for each batch, in the order in which they run."""
        return self._joined(self.batches, None)

    def program_of(self, rank: int) -> tuple[Program, ...]:
        """The programs that ``rank`` runs, one per batch; only tensors of ``rank`` are lowered.

        The programs also have the instructions of the ranks that share memory with ``rank``.
        """
        members = together([rank], self.domains)
        if members not in self._programs:
            self._programs[members] = self._joined(self.batches, members)
        return self._programs[members]

    @cached_property
    def _programs(self) -> dict[tuple[int, ...], tuple[Program, ...]]:
        return {}

    @paused_collector()
    def _joined(
        self, batches: tuple[BundleBatch, ...], ranks: tuple[int, ...] | None
    ) -> tuple[Program, ...]:
        """The programs of ``ranks``, or of all ranks if None."""
        known: dict[tuple[TensorPlan, int], Lanes] = {}

        def lowered(tensor_plan: TensorPlan, num_slices: int) -> Lanes:
            if (tensor_plan, num_slices) not in known:
                known[tensor_plan, num_slices] = tensor_plan.lanes(
                    num_slices, self.topology, ranks=ranks, domains=self.domains
                )
            return known[tensor_plan, num_slices]

        mine = {
            tensor_plan
            for tensor_plan in {member.tensor_plan for member in self.members}
            if ranks is None or any(rank in tensor_plan for rank in ranks)
        }
        programs = []
        for batch in batches:
            tensor_plans = self._tensor_plans(batch)
            tensors = {
                t: lowered(tensor_plan, num_slices)
                for t, (tensor_plan, num_slices) in enumerate(
                    zip(tensor_plans, batch.num_slices, strict=True)
                )
                if tensor_plan in mine
            }
            transitions = [tensor_plan.transition for tensor_plan in tensor_plans]
            programs.append(join(transitions, tensors, batch.buckets, ranks))
        return tuple(programs)

    def verify(self) -> Proof:
        """Prove every program right, or raise a ProgramError."""
        proofs = [verify(program) for program in self.programs]
        return Proof(tuple(sorted({pair for proof in proofs for pair in proof.rounds_apart})))

    # --- cost -----------------------------------------------------------------------------------

    @cached_property
    def is_counted(self) -> bool:
        """Whether costs are counted in the programs of all ranks.

        For larger bundles no program is lowered. The bytes that each beat of a program puts through
        each port are computed from the paths (``beat_costs``), and staging is given by its bound.
        """
        return len(self.members) * len(self.ranks) <= MAX_COUNTED

    @cached_property
    def step_costs(self) -> tuple[StepCost, ...]:
        """The costs of the steps of all programs, one after another.

        Law (tests/plans/test_load.py): the modelled bytes of each step equal the counted bytes.
        """
        if not self.is_counted:
            return self._modelled_costs
        return tuple(
            cost
            for program in self.programs
            for cost in program_step_costs(program, program.num_steps, self.links)
        )

    @cached_property
    def _modelled_costs(self) -> tuple[StepCost, ...]:
        return tuple(
            cost
            for batch in self.batches
            for cost in beat_costs(self._tensor_plans(batch), batch, self._loads, self._ports)
        )

    @property
    def modelled_secs(self) -> float:
        """The time of all beats by formula, for which no program is lowered."""
        return sum(cost.secs for cost in self._modelled_costs)

    def _tensor_plans(self, batch: BundleBatch) -> list[TensorPlan]:
        """The ways of a batch's tensors."""
        return [self.members[i].tensor_plan for i in batch.members]

    @cached_property
    def _ports(self) -> Ports:
        return Ports(self.links)

    @cached_property
    def _loads(self) -> dict[TensorPlan, list[Load]]:
        """The port loads of one tensor of every way, one load per exchange."""
        return {
            tensor_plan: self._ports.loads(tensor_plan)
            for tensor_plan in {m.tensor_plan: None for m in self.members}
        }

    @cached_property
    def busiest_bytes(self) -> tuple[int, ...]:
        """Bytes of all tensors through the busiest port of every level.

        For the given paths, the time that these bytes take is a lower bound for any order of
        tensors.
        """
        return self._ports.busiest_bytes(self._all_loads())

    def _all_loads(self) -> Iterator[tuple[Load, int]]:
        """The loads of all ways, and how many tensors have each."""
        for tensor_plan, n in Counter(member.tensor_plan for member in self.members).items():
            yield from ((load, n) for load in self._loads[tensor_plan])

    @cached_property
    def cost(self) -> Cost:
        """The cost of the call; its ``peak_bytes`` are the shards of all tensors, and staging."""
        return total_cost(self.step_costs, self.peak_bytes)

    @cached_property
    def peak_bytes(self) -> int:
        """Memory of the rank whose shards and staging take most; a bound unless ``is_counted``."""
        if self.is_counted:
            return self._peak_bytes(self.programs)
        return max(self.shard_bytes(rank) for rank in self.ranks) + self.staging_bytes

    def _peak_bytes(self, programs: tuple[Program, ...]) -> int:
        return max(
            size + max(program.arena(rank).num_bytes for program in programs)
            for rank, size in self._shard_bytes.items()
        )

    def shard_bytes(self, rank: int) -> int:
        """Bytes of all src and dst shards of ``rank``."""
        return self._shard_bytes[rank]

    @cached_property
    def staging_bytes(self) -> int:
        """The most staging bytes that any rank needs at once; a bound unless ``is_counted``."""
        if not self.is_counted:
            return max(batch.staging_bound for batch in self.batches)
        arenas = (program.arena(rank) for program in self.programs for rank in program.ranks)
        return max(arena.num_bytes for arena in arenas)

    @cached_property
    def _shard_bytes(self) -> dict[int, int]:
        """Bytes of all shards, by rank."""
        found: dict[int, int] = {}
        for tensor_plan, count in Counter(member.tensor_plan for member in self.members).items():
            for name in (SRC, DST):
                item = ITEM_BYTES[tensor_plan.transition.dtype(name)]
                for rank, size in shard_sizes(tensor_plan.transition.layout(name)).items():
                    found[rank] = found.get(rank, 0) + size * item * count
        return found

    def __str__(self) -> str:
        return "\n".join([*rows(self.members), *self._totals()])

    def _totals(self) -> Iterator[str]:
        """Lines with the bytes sent, the number of collectives, the time and the peak memory.

        The time is compared with the time of the busiest port, whose bytes do not depend on the
        order of tensors.
        """
        cost = self.cost
        shards = max(self.shard_bytes(rank) for rank in self.ranks)
        tensor_plans = {
            (m.transition.src_dtype, m.transition.dst_dtype): None for m in self.members
        }
        dtypes = ", ".join(a if a == b else f"{a} -> {b}" for a, b in tensor_plans)
        yield (
            f"total  {len(self.members)} tensors ({dtypes}) on {len(self.ranks)} ranks: "
            f"{bytes_text(cost.wire_bytes)} sent ({bytes_text(cost.host_bytes)} between hosts)"
        )
        busy_secs = self._ports.busy_secs(self._all_loads())
        gap = f" ({cost.secs / busy_secs:.3g}x the busiest port)" if busy_secs else ""
        yield f"       {self._calls_text()}, {secs_text(cost.secs)}{gap}"
        yield (
            f"       peak {bytes_text(cost.peak_bytes)} per rank: shards {bytes_text(shards)}, "
            f"staging {'' if self.is_counted else 'at most '}{bytes_text(self.staging_bytes)}"
        )

    def _calls_text(self) -> str:
        """The number of collectives, if costs are counted, else the number of buckets."""
        if not self.is_counted:
            num_buckets = sum(len(batch.buckets) for batch in self.batches)
            return f"{len(self.batches)} programs of {num_buckets} buckets, modelled"
        num_calls = sum(len(program.collectives) for program in self.programs)
        alone = sum(len(member.plan.program.collectives) for member in self.members)
        steps = len(self.step_costs)
        return f"{num_calls} collectives ({alone} one by one) in {steps} step{'s' * (steps > 1)}"


def bundle_over(made: Bundle, domains: SharedDomains) -> Bundle:
    """``made``, changed to other shared-memory domains (``domains``).

    Raises:
        MemoryLimitError: the changed bundle does not fit the limit of ``made``.
    """
    near = tuple(group for group in domains if len(group) > 1)
    return made if near == made.domains else fitting(replace(made, near=near))


def fitting(made: Bundle) -> Bundle:
    """``made`` if it fits its memory limit, else the bundle that only sends messages, if allowed.

    Raises:
        MemoryLimitError: neither fits.
    """
    if made.memory_limit is None:
        return made
    tried = [made]
    if made.executor == "auto" and made.domains:
        tried.append(replace(made, near=()))
    for bundle in tried:
        if bundle._fit[0] is not None:
            return bundle
    raise made._limit_error(min(bundle._fit[1] for bundle in tried))
