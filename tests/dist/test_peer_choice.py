"""Which executor runs: ranks read each other's memory where they can, and all of them agree."""

from __future__ import annotations

import ctypes
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import rvdcomm as rv
from bench.cluster import netns
from bench.cluster.emulated import Cluster
from rvdcomm import native
from rvdcomm.program import Program
from rvdcomm.run import choice, rank_program
from rvdcomm.run.world import World
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.world import ProcessWorld, Worlds

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted"),
]

ROOT = Path(__file__).resolve().parents[2]
NUM_RANKS = 4
PAIR = rv.Layout((9, 10), "R(1)V(2)D(2,1)"), rv.Layout((9, 10), "R(1)V(1)D(1,4)")
TWO_HOSTS = rv.Topology.hosts([[0, 2], [1, 3]], rv.Link(1e-6, 1e10), rv.Link(1e-5, 1e9))
ALL = ((0, 1, 2, 3),)

Groups = tuple[tuple[int, ...], ...]
Found = tuple[Groups, bool, Any]
"""Who reads whose memory, whether anything is sent by the backend, and a result."""


def use(call: Any, rank: int, src: rv.Layout = PAIR[0]) -> Found:
    """The peer groups of a compiled transition, whether it sends messages, and its result."""
    program: Program = call._program.program
    return program.peer_groups, bool(program.collectives), call(shard_of(rank, src)).numpy()


def faults_of_use(
    found: list[Found],
    groups: Groups,
    sends: bool,
    pair: tuple[rv.Layout, rv.Layout] = PAIR,
) -> list[str]:
    """Differences from the wanted groups, sends and results on any rank."""
    faults = [
        f"rank {rank}: peer groups {got}, sends: {does_send}"
        for rank, (got, does_send, _) in enumerate(found)
        if (got, does_send) != (tuple(group for group in groups if rank in group), sends)
    ]
    return faults + faults_of([result for _, _, result in found], *pair)


# --- what is asked for --------------------------------------------------------------------------


def choose(
    rank: int, argument: str | None, variable: str | None, topology: rv.Topology | None
) -> Found:
    if variable is not None:
        os.environ["RVDCOMM_EXECUTOR"] = variable
    try:
        return use(rv.Redistributor(rv.plan(*PAIR, "float32", topology), executor=argument), rank)
    finally:
        os.environ.pop("RVDCOMM_EXECUTOR", None)


@pytest.mark.parametrize(
    "argument, variable, groups",
    [
        (None, None, ALL),
        ("auto", None, ALL),
        ("peer", None, ALL),
        ("dist", None, ()),
        (None, "dist", ()),
        (None, "peer", ALL),
        (None, "", ALL),
        ("peer", "dist", ALL),
        ("dist", "peer", ()),
    ],
)
def test_argument_overrides_environment_variable_in_the_choice_of_executor(
    worlds: Worlds, argument: str | None, variable: str | None, groups: Groups
) -> None:
    found = worlds(NUM_RANKS).run(choose, argument, variable, None)
    assert faults_of_use(found, groups, sends=not groups) == []


@pytest.mark.parametrize("executor", ["auto", "peer"])
def test_ranks_of_different_hosts_of_the_topology_send_messages(
    worlds: Worlds, executor: str
) -> None:
    found = worlds(NUM_RANKS).run(choose, executor, None, TWO_HOSTS)
    assert faults_of_use(found, ((0, 2), (1, 3)), sends=True) == []


def test_ranks_alone_on_their_hosts_send_messages(worlds: Worlds) -> None:
    link = rv.Link(1e-6, 1e9)
    alone = rv.Topology.hosts([[rank] for rank in range(NUM_RANKS)], link, link)
    found = worlds(NUM_RANKS).run(choose, "auto", None, alone)
    assert faults_of_use(found, (), sends=True) == []


def name_none(rank: int, argument: str | None, variable: str | None) -> tuple[str, str]:
    if variable is not None:
        os.environ["RVDCOMM_EXECUTOR"] = variable
    try:
        made = error_of(lambda: rv.Redistributor(rv.plan(*PAIR), executor=argument))
        shard = shard_of(rank, PAIR[0])
        return made, error_of(lambda: rv.redistribute(shard, *PAIR, executor=argument))
    finally:
        os.environ.pop("RVDCOMM_EXECUTOR", None)


@pytest.mark.parametrize("argument, variable", [("nccl", None), (None, "nccl"), ("nccl", "dist")])
def test_an_unknown_executor_is_an_error_that_lists_the_known_ones(
    worlds: Worlds, argument: str | None, variable: str | None
) -> None:
    fact = "executor 'nccl' is unknown; use one of auto, dist, peer."
    what = "redistribute {} -> {}: rank 0".format(*PAIR)
    errors = f"LayoutError: {fact}", f"LayoutError: {what}: {fact}"
    assert worlds(NUM_RANKS).run(name_none, argument, variable) == [errors] * NUM_RANKS


def disagree(rank: int) -> tuple[str, Any]:
    """A call about which ranks disagree, and a good call after it."""
    shard = shard_of(rank, PAIR[0])
    executor = "dist" if rank == 2 else "peer"
    error = error_of(lambda: rv.redistribute(shard, *PAIR, executor=executor))
    return error, rv.redistribute(shard, *PAIR, executor="peer").numpy()


def test_disagreement_about_the_executor_is_an_error_on_every_rank(worlds: Worlds) -> None:
    errors, results = zip(*worlds(NUM_RANKS).run(disagree), strict=True)
    fact = "ranks disagree about executor: rank 0 asks for peer, rank 2 for dist."
    assert errors == (f"LayoutError: redistribute: {fact}",) * NUM_RANKS
    assert faults_of(results, *PAIR) == []


# --- ranks without the native core --------------------------------------------------------------


@contextmanager
def native_core(is_there: bool) -> Iterator[None]:
    """As with ``RVDCOMM_NATIVE=0``, which is read when rvdcomm is imported."""
    saved = choice.core
    choice.core = rank_program.core = saved if is_there else None
    try:
        yield
    finally:
        choice.core = rank_program.core = saved


def lack_core(rank: int, lacking: list[int], executor: str) -> tuple[str, Found | None]:
    found: list[Found] = []
    with native_core(rank not in lacking):
        error = error_of(
            lambda: found.append(use(rv.Redistributor(rv.plan(*PAIR), executor=executor), rank))
        )
    return error, found[0] if found else None


@pytest.fixture
def fresh(worlds: Worlds) -> Iterator[ProcessWorld]:
    """A world in which nobody has asked who can reach whom, and that is not used again."""
    world = worlds(NUM_RANKS)
    world.stop()
    yield world
    world.stop()


@pytest.mark.parametrize(
    "lacking, groups", [([2], ((0, 1, 3),)), ([0, 1, 3], ()), ([0, 1, 2, 3], ())]
)
def test_rank_without_the_native_core_uses_messages(
    fresh: ProcessWorld, lacking: list[int], groups: Groups
) -> None:
    errors, found = zip(*fresh.run(lack_core, lacking, "auto"), strict=True)
    assert errors == ("none",) * NUM_RANKS
    assert faults_of_use(found, groups, sends=True) == []


def test_executor_peer_is_an_error_on_every_rank_if_one_has_no_native_core(
    fresh: ProcessWorld,
) -> None:
    error = (
        "CommError: executor 'peer': ranks (0,1,3) and (2) of one host cannot map each other's "
        "memory: they are on different machines, in different network namespaces or of different "
        "users, or a rank has no native core or asked for 'dist'. Use 'auto', or a topology that "
        "tells them apart."
    )
    assert fresh.run(lack_core, [2], "peer") == [(error, None)] * NUM_RANKS


# --- memory that is refused ---------------------------------------------------------------------

LARGE = rv.Layout((1024, 640), "R(1)V(4)D(1,1)"), rv.Layout((1024, 640), "R(1)V(1)D(4,1)")


def lack_memory(rank: int, executor: str) -> tuple[str, Any, Groups, Any]:
    """Rank 2 may share only little memory, which suffices for a small transition."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    found: list[Found] = []
    try:
        error = error_of(
            lambda: found.append(
                use(rv.Redistributor(rv.plan(*LARGE), executor=executor), rank, LARGE[0])
            )
        )
        groups, _, small = use(rv.Redistributor(rv.plan(*PAIR), executor="peer"), rank)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    return error, found[0] if found else None, groups, small


def test_failed_reservation_on_one_rank_makes_all_ranks_send_messages(fresh: ProcessWorld) -> None:
    errors, large, groups, small = zip(*fresh.run(lack_memory, "auto"), strict=True)
    assert errors == ("none",) * NUM_RANKS
    assert faults_of_use(large, (), sends=True, pair=LARGE) == []
    assert groups == (ALL,) * NUM_RANKS
    assert faults_of(small, *PAIR) == []


def test_failed_reservation_on_one_rank_is_an_error_of_executor_peer_on_all(
    fresh: ProcessWorld,
) -> None:
    errors, _, groups, small = zip(*fresh.run(lack_memory, "peer"), strict=True)
    assert len(set(errors)) == 1
    start = (
        "CommError: executor 'peer': reserving shared memory on ranks (0:4): rank 2 cannot reserve "
    )
    assert errors[0].startswith(start)
    assert int(errors[0].removeprefix(start).split(" bytes: File too large")[0]) > 64 << 10
    assert groups == (ALL,) * NUM_RANKS
    assert faults_of(small, *PAIR) == []


# --- machines that are not as usual -------------------------------------------------------------

CLONE_NEWNS = 0x0002_0000
CLONE_NEWNET = 0x4000_0000
MS_PRIVATE_ALL = 0x4000 | 1 << 18


def libc(function: str, *args: Any) -> None:
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*args) != 0:
        raise OSError(ctypes.get_errno(), function)


def may_unshare(flags: int) -> bool:
    child = os.fork()
    if child == 0:
        os._exit(ctypes.CDLL(None).unshare(flags) != 0)
    return os.waitpid(child, 0)[1] == 0


def hide_dev_shm() -> None:
    """As in a container that has none; only a mount may hide the folder of this machine."""
    libc("unshare", CLONE_NEWNS)
    libc("mount", None, b"/", None, MS_PRIVATE_ALL, None)
    libc("mount", b"none", b"/dev", b"tmpfs", 1, b"size=4k")  # read-only, and empty


def lack_dev_shm(rank: int) -> tuple[bool, Found]:
    hide_dev_shm()
    call = rv.Redistributor(rv.plan(*PAIR), executor="peer")
    return Path("/dev/shm").exists(), use(call, rank)


def test_executor_peer_works_without_dev_shm(fresh: ProcessWorld) -> None:
    if not may_unshare(CLONE_NEWNS):
        pytest.skip("needs the right to make mount namespaces (root)")
    exists, found = zip(*fresh.run(lack_dev_shm), strict=True)
    assert exists == (False,) * NUM_RANKS
    assert faults_of_use(found, ALL, sends=False) == []


def part_networks(rank: int) -> str:
    """As two containers with one host name: ranks 0 and 3 in this network, 1 and 2 in their own."""
    _ = World.of().store
    if rank in (1, 2):
        # Connections that are open stay; the store's is.
        libc("unshare", CLONE_NEWNET)
    return error_of(lambda: rv.Redistributor(rv.plan(*PAIR), executor="peer"))


def test_error_of_executor_peer_names_ranks_of_different_networks(fresh: ProcessWorld) -> None:
    if not may_unshare(CLONE_NEWNET):
        pytest.skip("needs the right to make network namespaces (root)")
    start = (
        "CommError: executor 'peer': ranks (0,3) and (1) and (2) of one host cannot map each "
        "other's memory: they are on different machines, in different network namespaces or of"
    )
    assert [error.startswith(start) for error in fresh.run(part_networks)] == [True] * NUM_RANKS


ON_CLUSTER = """
import socket, sys, torch, torch.distributed as dist
import rvdcomm as rv
from tests.dist.shards import shard_of
from tests.dist.test_peer_choice import faults_on_cluster

torch.set_num_threads(1)
dist.init_process_group("gloo")
hosts = rv.Topology.hosts([[0, 1], [2, 3]], rv.Link(1e-6, 1e10), rv.Link(1e-5, 1e8))
for topology in (hosts, None):
    print(faults_on_cluster(dist.get_rank(), topology), socket.gethostname())
dist.destroy_process_group()
"""


def faults_on_cluster(rank: int, topology: rv.Topology | None) -> list[str]:
    """What is wrong on this rank where ranks 0, 1 and ranks 2, 3 are on hosts of their own."""
    src, dst = rv.Layout((9, 10), "R(1)V(4)D(1,1)"), rv.Layout((9, 10), "R(4)V(1)D(1,1)")
    call = rv.Redistributor(rv.plan(src, dst, "float32", topology))
    result = call(shard_of(rank, src))
    want = sum(shard_of(peer, src) for peer in src.ranks)
    groups = call._program.program.peer_groups
    own = ((0, 1),) if rank < 2 else ((2, 3),)
    faults = [] if groups == own else [f"peer groups are {groups}"]
    return faults + ([] if torch.equal(result, want) else ["the result is wrong"])


@pytest.mark.cluster
def test_hosts_with_equal_names_share_memory_inside_and_send_messages_between() -> None:
    missing = netns.missing_requirements()
    if missing:
        pytest.skip("a cluster needs " + "; ".join(missing))
    with Cluster(hosts=2, ranks_per_host=2, rate_bits_per_sec=1e9) as cluster:
        command = [sys.executable, "-c", ON_CLUSTER]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        results = cluster.run(command, timeout_secs=90, env=env, echo=False)
    lines = [line for result in results for line in result.stdout.splitlines()]
    assert lines == [f"[] {os.uname().nodename}"] * (2 * NUM_RANKS)
