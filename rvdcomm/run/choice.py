"""Choice: the program that this group runs for a plan, and who runs which part of it.

Ranks that can map each other's memory read from it (``peer``); all others are sent messages by
``torch.distributed`` (``dist``). All ranks choose alike: they have asked each other who can.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial

from rvdcomm.errors import CommError, LayoutError
from rvdcomm.layout import Topology, ranges_text
from rvdcomm.native import core
from rvdcomm.planning.pipeline import NUM_SLICES, best_num_slices
from rvdcomm.plans.bundle import Batch, Bundle
from rvdcomm.plans.planner import Plan
from rvdcomm.program import Program
from rvdcomm.program.lower import lower
from rvdcomm.run.agree import exchange_posts
from rvdcomm.run.rank_program import RankProgram
from rvdcomm.run.shared_memory.rendezvous import islands
from rvdcomm.run.shared_memory.staging import staging_of
from rvdcomm.run.world import World

EXECUTORS = ("auto", "dist", "peer")

WINDOW_BYTES = 512 << 10
"""Staging of a slice that ranks read from each other; it should still be in the cache then."""

MAX_WINDOWS_OF_ALL = 128
"""Windows times ranks: lowering takes a millisecond for some ten of them, on the first call."""

Groups = tuple[tuple[int, ...], ...]


def executor_name(asked: str | None) -> str:
    """What was asked for, or else ``RVDCOMM_EXECUTOR``, or else ``auto``.

    Raises:
        LayoutError: that is none of ``EXECUTORS``.
    """
    name = asked or os.environ.get("RVDCOMM_EXECUTOR") or "auto"
    if name not in EXECUTORS:
        raise LayoutError(f"executor {name!r} is unknown; use one of {', '.join(EXECUTORS)}.")
    return name


def compiled(plan: Plan, world: World, executor: str) -> RankProgram:
    """The plan for this rank; collective over the ranks of the plan.

    Raises:
        CommError: ``peer`` was asked for, and ranks of one host cannot share memory; on all ranks.
    """
    members = tuple(sorted({*plan.src.ranks, *plan.dst.ranks}))
    islands = _islands(plan.topology, members, world, executor)
    if islands:
        program = near_program(plan, islands)
        if _may_run([program], members, world, executor):
            return RankProgram(program, world)
    return RankProgram(plan.program, world)


def compiled_many(bundle: Bundle, world: World, executor: str) -> list[tuple[Batch, RankProgram]]:
    """The batches that this rank takes part in; collective over the ranks of the bundle.

    Raises:
        CommError: as of ``compiled``.
        MemoryLimitError: the limit is too low, on all ranks.
    """
    islands = _islands(bundle.topology, bundle.ranks, world, executor)
    batches = bundle.lowered(islands)
    programs = [batch.program for batch in batches]
    if islands and not _may_run(programs, bundle.ranks, world, executor):
        batches = bundle.batches
    return [
        (batch, RankProgram(batch.program, world))
        for batch in batches
        if world.rank in batch.program.ranks
    ]


def near_program(plan: Plan, islands: Groups) -> Program:
    """What runs where ``islands`` can map each other's memory: the plan's path, in slices.

    The cost model picks their number where near and far transfers can overlap; where all is near,
    slices are windows whose staging is still in the cache when it is read.
    """
    lowered = partial(lower, plan.path, plan.dtype, plan.topology, islands=islands)
    num_slices = best_num_slices(plan.path, plan.dtype, plan.topology)
    program = lowered(num_slices=num_slices)
    if program.collectives:
        return program
    staging = max(program.arena(rank).num_bytes for rank in program.ranks)
    most = [n for n in NUM_SLICES if n * len(program.ranks) <= MAX_WINDOWS_OF_ALL] or [1]
    wanted = next((n for n in most if staging <= n * WINDOW_BYTES), most[-1])
    return program if wanted <= num_slices else lowered(num_slices=wanted)


def _islands(topology: Topology, members: tuple[int, ...], world: World, executor: str) -> Groups:
    """Ranks that are to read each other's memory, as groups of two or more."""
    hosts = _hosts(topology, members)
    if world.rank not in members or not _may_be_near(world, executor):
        return ()
    if all(len(host) == 1 for host in hosts):
        return ()
    # A rank that cannot or may not share memory says so to the others by being in no host.
    willing = hosts if core is not None and executor != "dist" else ()
    key = ("islands", members, hosts, willing)
    found: Groups = world.once(key, lambda: islands(world, members, willing))
    if executor == "peer":
        _check_all_near(found, hosts)
    return tuple(island for island in found if len(island) > 1)


def _may_be_near(world: World, executor: str) -> bool:
    """Whether memory can be shared on the world's device.

    On GPUs only if it was asked for: NCCL maps the neighbours' memory itself.
    """
    if world.device.type == "cuda":
        return executor == "peer" and core is not None and core.has_cuda
    return world.backend == "gloo"


def _hosts(topology: Topology, members: tuple[int, ...]) -> Groups:
    """Ranks that the topology puts on one host."""
    levels = topology.levels
    groups = levels[1].groups if len(levels) > 1 else (members,)
    found = (tuple(rank for rank in group if rank in members) for group in groups)
    return tuple(group for group in found if group)


def _check_all_near(found: Groups, hosts: Groups) -> None:
    for host in hosts:
        parts = [island for island in found if set(island) <= set(host)]
        if len(parts) > 1:
            apart = " and ".join(f"({ranges_text(part)})" for part in parts)
            raise CommError(
                f"executor 'peer': ranks {apart} of one host cannot map each other's memory: they "
                "are on different machines, in different network namespaces or of different users, "
                "or a rank has no native core or asked for 'dist'. Use 'auto', or a topology that "
                "tells them apart."
            )


def _may_run(
    programs: Sequence[Program], members: tuple[int, ...], world: World, executor: str
) -> bool:
    """Share the memory that programs need; whether the system refused it to no rank.

    All members learn it, also those of other islands: they must run the same programs.

    Raises:
        CommError: it did, and nothing else than ``peer`` will do.
    """
    refusal = next(filter(None, (_refusal(program, world) for program in programs)), "")
    posts = exchange_posts(world, members, {"refusal": refusal}, "sharing memory")
    refusals = [post["refusal"] for post in posts.values() if post["refusal"]]
    if refusals and executor == "peer":
        raise CommError(f"executor 'peer': {refusals[0]}")
    return not refusals


def _refusal(program: Program, world: World) -> str:
    """What the system says to the memory that the islands of a program need of this rank."""
    group = next((group for group in program.peer_groups if world.rank in group), None)
    if group is None:
        return ""
    from rvdcomm.run.shared_memory.segment import SharedMemoryError  # It needs the native core.

    try:
        staging_of(world, group).reserve({r: program.arena(r).num_bytes for r in group})
    except SharedMemoryError as error:
        return str(error)
    return ""
