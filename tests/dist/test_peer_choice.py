"""Which executor runs: ranks read each other's memory where they can, and all of them agree."""

from __future__ import annotations

import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from bench.cluster import netns
from bench.cluster.emulated import Cluster
from rvdcomm import native
from rvdcomm.program import Program
from rvdcomm.run import choice, rank_program
from rvdcomm.run.world import World
from tests.dist.namespaces import CLONE_NEWNET, hide, libc
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of

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


def assert_used(
    rank: int,
    call: rv.Redistributor,
    groups: Groups,
    sends: bool,
    pair: tuple[rv.Layout, rv.Layout] = PAIR,
) -> None:
    """These groups read each other's memory, messages are sent or not, and the result is right."""
    program: Program = call._program.program
    assert program.peer_groups == tuple(group for group in groups if rank in group)
    assert bool(program.collectives) == sends
    assert_moved(call(shard_of(rank, pair[0])), *pair)


def compiled(pair: tuple[rv.Layout, rv.Layout], executor: str) -> rv.Redistributor:
    """A call in a new group, in which nobody has asked who can reach whom."""
    return rv.Redistributor(rv.plan(*pair), dist.new_group(), executor=executor)


# --- what is asked for --------------------------------------------------------------------------


@contextmanager
def variable_set(variable: str | None) -> Iterator[None]:
    """The environment variable that chooses the executor, on this rank."""
    with pytest.MonkeyPatch.context() as patch:
        if variable is not None:
            patch.setenv("RVDCOMM_EXECUTOR", variable)
        yield


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
@on_ranks(NUM_RANKS)
def test_argument_overrides_environment_variable_in_the_choice_of_executor(
    rank: int,
    argument: str | None,
    variable: str | None,
    topology: rv.Topology | None,
    groups: Groups,
) -> None:
    """Ranks of different hosts of the topology send messages."""
    with variable_set(variable):
        call = rv.Redistributor(rv.plan(*PAIR, "float32", topology), executor=argument)
        assert_used(rank, call, groups, sends=groups != ALL)


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


@pytest.mark.parametrize(
    "lacking, groups", [([2], ((0, 1, 3),)), ([0, 1, 3], ()), ([0, 1, 2, 3], ())]
)
@on_ranks(NUM_RANKS)
def test_rank_without_the_native_core_uses_messages(
    rank: int, lacking: list[int], groups: Groups
) -> None:
    with native_core(rank not in lacking):
        assert_used(rank, compiled(PAIR, "auto"), groups, sends=True)


@on_ranks(NUM_RANKS)
def test_executor_peer_is_an_error_on_every_rank_if_one_has_no_native_core(rank: int) -> None:
    with native_core(rank != 2):
        assert error_of(lambda: compiled(PAIR, "peer")) == (
            "CommError: executor 'peer': ranks (0,1,3) and (2) of one host cannot map each other's "
            "memory: they are on different machines, in different network namespaces or of "
            "different users, or a rank has no native core or asked for 'dist'. Use 'auto', or a "
            "topology that tells them apart."
        )


# --- memory that is refused ---------------------------------------------------------------------

LARGE = rv.Layout((1024, 640), "R(1)V(4)D(1,1)"), rv.Layout((1024, 640), "R(1)V(1)D(4,1)")


@contextmanager
def little_memory(rank: int) -> Iterator[None]:
    """Rank 2 may share only little memory, which suffices for a small transition."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (64 << 10, before[1]))
    try:
        yield
        assert_used(rank, compiled(PAIR, "peer"), ALL, sends=False)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@on_ranks(NUM_RANKS)
def test_failed_reservation_on_one_rank_makes_all_ranks_send_messages(rank: int) -> None:
    with little_memory(rank):
        assert_used(rank, compiled(LARGE, "auto"), (), sends=True, pair=LARGE)


@on_ranks(NUM_RANKS)
def test_failed_reservation_on_one_rank_is_an_error_of_executor_peer_on_all(rank: int) -> None:
    with little_memory(rank):
        error = error_of(lambda: compiled(LARGE, "peer"))
        start = "CommError: executor 'peer': reserving shared memory on ranks (0:4): rank 2 cannot "
        num_bytes, _, why = error.removeprefix(f"{start}reserve ").partition(" bytes: ")
        assert int(num_bytes) > 64 << 10
        assert why.startswith("File too large")


# --- machines that are not as usual -------------------------------------------------------------


@pytest.mark.usefixtures("mount_namespaces")
@on_ranks(NUM_RANKS, is_last=True)
def test_executor_peer_works_without_dev_shm(rank: int) -> None:
    """As in a container that has none."""
    hide("/dev")
    assert not Path("/dev/shm").exists()
    assert_used(rank, compiled(PAIR, "peer"), ALL, sends=False)


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
