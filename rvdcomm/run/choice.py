"""Choice: which plan this group can run, given whose memory its ranks can map.

A plan says which ranks read each other's memory: its shared-memory domains, called *domains* here.
Where ranks cannot do that (another machine, a rank without the native core, a system that refuses
shared memory), all ranks plan again, under the same memory limit, for what is possible here. All
ranks choose the same plan, because they have told each other what they can map.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from rvdcomm.errors import CommError, MemoryLimitError
from rvdcomm.layout import ranges_text
from rvdcomm.native import core
from rvdcomm.network import Topology
from rvdcomm.plans.bundle import Bundle, bundle_over
from rvdcomm.plans.by_trees import may_differ
from rvdcomm.plans.fill import BundleBatch
from rvdcomm.plans.many_by_trees import trees_of, with_trees_of
from rvdcomm.plans.plan import Plan, hosts_of
from rvdcomm.plans.planner import check_executor, plan_over, plan_with, with_trees
from rvdcomm.program import Program, SharedDomains
from rvdcomm.run.agree import exchange_posts
from rvdcomm.run.rank_program import RankProgram
from rvdcomm.run.shared_memory.rendezvous import domains
from rvdcomm.run.shared_memory.staging import staging_of
from rvdcomm.run.world import World


def executor_name(asked: str | None, default: str = "auto") -> str:
    """The executor: ``asked``, or else the variable ``RVDCOMM_EXECUTOR``, or else ``default``.

    Raises:
        LayoutError: there is no executor of this name.
    """
    name = asked or os.environ.get("RVDCOMM_EXECUTOR") or default
    check_executor(name)
    return name


def plan_here(plan: Plan, world: World, executor: str) -> Plan:
    """The plan that this group can run instead of ``plan``; collective over its ranks.

    Raises:
        CommError: ``peer`` was asked for, and ranks of one host cannot share memory; on all ranks.
        MemoryLimitError: no plan that is possible here fits the plan's limit; on all ranks.
    """
    plan = plan_with(plan, executor=executor)
    if world.rank in plan.path.ranks and may_differ(plan):
        plan = _with_agreed_trees(plan, world)
    if not plan.domains or world.rank not in plan.path.ranks:
        return plan
    members = plan.path.ranks
    made = plan_over(plan, _domains(plan.topology, members, world, executor))
    if made.domains and not _may_run([made.program_of(world.rank)], members, world, executor):
        made = plan_over(plan, ())
    return made


def _with_agreed_trees(plan: Plan, world: World) -> Plan:
    """The plan with the trees of the first rank, or without trees if that has none.

    Machines may find different trees, since a linear program often has several best solutions.
    """
    mine = None if plan.forest is None else plan.forest.to_json()
    agreed = _of_first(world, plan.path.ranks, mine)
    return plan if agreed == mine else with_trees(plan, agreed)


def _of_first(world: World, members: tuple[int, ...], mine: Any) -> Any:
    """What the first rank has found, as plain values; collective over the members."""
    first = members[0]
    post = {"trees": json.dumps(mine) if world.rank == first else ""}
    return json.loads(exchange_posts(world, members, post, "trees")[first]["trees"])


def compiled_many(bundle: Bundle, world: World) -> list[tuple[BundleBatch, RankProgram]]:
    """The batches that this rank takes part in; collective over the ranks of the bundle.

    Raises:
        CommError: as of ``plan_here``.
        MemoryLimitError: the limit is too low, on all ranks.
    """
    executor, members = bundle.executor, bundle.ranks
    bundle = _with_agreed_trees_of(bundle, world)
    if bundle.domains:
        bundle = bundle_over(bundle, _domains(bundle.topology, members, world, executor))
        programs = bundle.program_of(world.rank) if bundle.domains else ()
        if bundle.domains and not _may_run(programs, members, world, executor):
            bundle = bundle_over(bundle, ())
    _check_limit(bundle, world)
    programs = bundle.program_of(world.rank)
    return [
        (batch, RankProgram(program, f"batch {i} of {bundle.identity}", world))
        for i, (batch, program) in enumerate(zip(bundle.batches, programs, strict=True))
        if program.shard_names(world.rank)
    ]


def _with_agreed_trees_of(bundle: Bundle, world: World) -> Bundle:
    """The bundle with the trees of the first rank, as ``_with_agreed_trees``."""
    mine = trees_of(bundle)
    if mine is None:
        return bundle
    agreed = _of_first(world, bundle.ranks, mine)
    return bundle if agreed == mine else with_trees_of(bundle, agreed)


def _check_limit(bundle: Bundle, world: World) -> None:
    """Raise, on all ranks, if the program of some rank exceeds the limit.

    Buckets are chosen by bounds on the sizes of buffers. These bounds leave out the gaps between
    the buffers in memory, so a program may need more than was planned.
    """
    if bundle.memory_limit is None:
        return
    programs = bundle.program_of(world.rank)
    staging = max(program.arena(world.rank).num_bytes for program in programs)
    post = {"peak_bytes": bundle.shard_bytes(world.rank) + staging}
    posts = exchange_posts(world, bundle.ranks, post, "memory_limit")
    rank, most = max(
        ((rank, post["peak_bytes"]) for rank, post in posts.items()), key=lambda found: found[1]
    )
    if most > bundle.memory_limit:
        raise MemoryLimitError(
            f"redistribute_many of {len(bundle.members)} tensors: memory_limit="
            f"{bundle.memory_limit} bytes per rank, but rank {rank} needs {most}; its src and dst "
            f"shards alone are {bundle.shard_bytes(rank)}."
        )


def _domains(
    topology: Topology, members: tuple[int, ...], world: World, executor: str
) -> SharedDomains:
    """The domains to plan for: groups of two or more ranks that can map each other's memory."""
    hosts = hosts_of(topology, members)
    if world.rank not in members or not _may_be_near(world, executor):
        return ()
    if all(len(host) == 1 for host in hosts):
        return ()
    # A rank that cannot or may not share memory passes no hosts, so that it forms no domain.
    willing = hosts if core is not None and executor != "dist" else ()
    key = ("domains", members, hosts, willing)
    found: SharedDomains = world.once(key, lambda: domains(world, members, willing))
    if executor == "peer":
        _check_all_near(found, hosts)
    return tuple(domain for domain in found if len(domain) > 1)


def _may_be_near(world: World, executor: str) -> bool:
    """Whether memory can be shared on the world's device.

    On GPUs only with ``executor="peer"``, because NCCL maps the neighbours' memory itself.
    """
    if world.device.type == "cuda":
        return executor == "peer" and core is not None and core.has_cuda
    return world.backend == "gloo"


def _check_all_near(found: SharedDomains, hosts: SharedDomains) -> None:
    for host in hosts:
        parts = [domain for domain in found if set(domain) <= set(host)]
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
    """Try to share the memory that the programs need; False if the system refuses it to any rank.

    All members get the same answer, also those of other domains, because all must run one plan.

    Raises:
        CommError: the system refused, and ``executor`` is "peer".
    """
    refusal = next(filter(None, (_refusal(program, world) for program in programs)), "")
    # Two timeouts, because a domain that loses a member may take one and a half to fail: half a
    # timeout to connect its sockets, and one for its own agreement.
    post = {"refusal": refusal}
    posts = exchange_posts(world, members, post, "sharing memory", num_timeouts=2)
    refusals = [post["refusal"] for post in posts.values() if post["refusal"]]
    if refusals and executor == "peer":
        raise CommError(f"executor 'peer': {refusals[0]}")
    return not refusals


def _refusal(program: Program, world: World) -> str:
    """Reserve the shared memory that a program needs; returns why the system refused, or ''."""
    group = next((group for group in program.peer_groups if world.rank in group), None)
    if group is None:
        return ""
    from rvdcomm.run.shared_memory.segment import SharedMemoryError  # It needs the native core.

    try:
        staging_of(world, group).reserve({r: program.arena(r).num_bytes for r in group})
    except SharedMemoryError as error:
        return str(error)
    return ""
