"""Which executor runs: ranks read each other's memory where they can, and all of them agree."""

from __future__ import annotations

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
from tests.dist.namespaces import CLONE_NEWNET, hide, libc
from tests.dist.on_ranks import on_ranks
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
    found: list[Found], groups: Groups, sends: bool, pair: tuple[rv.Layout, rv.Layout] = PAIR
) -> list[str]:
    """Differences from the wanted groups, sends and results on any rank."""
    faults = [
        f"rank {rank}: peer groups {got}, sends: {does_send}"
        for rank, (got, does_send, _) in enumerate(found)
        if (got, does_send) != (tuple(group for group in groups if rank in group), sends)
    ]
    return faults + faults_of([result for _, _, result in found], *pair)


# --- what is asked for --------------------------------------------------------------------------


@contextmanager
def variable_set(variable: str | None) -> Iterator[None]:
    """The environment variable that chooses the executor, on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        if variable is not None:
            patch.setenv("RVDCOMM_EXECUTOR", variable)
        yield


def choose(
    rank: int, argument: str | None, variable: str | None, topology: rv.Topology | None
) -> Found:
    with variable_set(variable):
        return use(rv.Redistributor(rv.plan(*PAIR, "float32", topology), executor=argument), rank)


LINK = rv.Link(1e-6, 1e9)
ALONE = rv.Topology.hosts([[rank] for rank in range(NUM_RANKS)], LINK, LINK)


@pytest.mark.parametrize(
    "argument, variable, topology, groups",
    [
        (None, None, None, ALL),
        ("peer", None, None, ALL),
        ("dist", None, None, ()),
        (None, "dist", None, ()),
        (None, "", None, ALL),
        ("peer", "dist", None, ALL),
        ("dist", "peer", None, ()),
        ("auto", None, TWO_HOSTS, ((0, 2), (1, 3))),
        ("peer", None, TWO_HOSTS, ((0, 2), (1, 3))),
        ("auto", None, ALONE, ()),
    ],
)
def test_argument_overrides_environment_variable_in_the_choice_of_executor(
    worlds: Worlds,
    argument: str | None,
    variable: str | None,
    topology: rv.Topology | None,
    groups: Groups,
) -> None:
    """Ranks of different hosts of the topology send messages."""
    found = worlds(NUM_RANKS).run(choose, argument, variable, topology)
    assert faults_of_use(found, groups, sends=groups != ALL) == []


@pytest.mark.parametrize("argument, variable", [("nccl", None), (None, "nccl"), ("nccl", "dist")])
@on_ranks(NUM_RANKS)
def test_an_unknown_executor_is_an_error_that_lists_the_known_ones(
    rank: int, argument: str | None, variable: str | None
) -> None:
    fact = "executor 'nccl' is unknown; use one of auto, dist, peer."
    what = "redistribute {} -> {}: rank 0".format(*PAIR)
    with variable_set(variable):
        made = error_of(lambda: rv.Redistributor(rv.plan(*PAIR), executor=argument))
        shard = shard_of(rank, PAIR[0])
        called = error_of(lambda: rv.redistribute(shard, *PAIR, executor=argument))
    assert (made, called) == (f"LayoutError: {fact}", f"LayoutError: {what}: {fact}")


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


def lack_dev_shm(rank: int) -> Found:
    """As in a container that has none."""
    hide("/dev")
    assert not Path("/dev/shm").exists()
    return use(rv.Redistributor(rv.plan(*PAIR), executor="peer"), rank)


@pytest.mark.usefixtures("mount_namespaces")
def test_executor_peer_works_without_dev_shm(fresh: ProcessWorld) -> None:
    assert faults_of_use(fresh.run(lack_dev_shm), ALL, sends=False) == []


@pytest.mark.usefixtures("network_namespaces")
@on_ranks(NUM_RANKS, 19.0, is_last=True)
def test_error_of_executor_peer_names_ranks_of_different_networks(rank: int) -> None:
    """As two containers with one host name: ranks 0 and 3 in this network, 1 and 2 in their own."""
    _ = World.of().store
    if rank in (1, 2):
        # Connections that are open stay; the store's is.
        libc("unshare", CLONE_NEWNET)
    error = error_of(lambda: rv.Redistributor(rv.plan(*PAIR), executor="peer"))
    assert error.startswith(
        "CommError: executor 'peer': ranks (0,3) and (1) and (2) of one host cannot map each "
        "other's memory: they are on different machines, in different network namespaces or of"
    )


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
