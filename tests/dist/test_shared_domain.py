"""Domains: ranks of one machine read each other's memory, and a lost rank is named by all."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("rvdcomm._C", reason="the extension is not built")

from rvdcomm import _C
from rvdcomm.errors import CommError
from rvdcomm.run.shared_memory.domain import SharedDomain, SharedMemoryError, domains
from rvdcomm.run.shared_memory.rendezvous import partition
from rvdcomm.run.world import World
from tests.dist.namespaces import CLONE_NEWNET, hide, libc
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import error_of
from tests.dist.world import Worlds

pytestmark = [pytest.mark.dist, pytest.mark.alone]

NUM_RANKS = 4
ALL = tuple(range(NUM_RANKS))
WAIT_SECS = 20.0
# A lost rank is noticed after 50 ms; the rest is for a busy machine.
SOON_SECS = 5.0


def domain_of(num_bytes: int = 0, ranks: tuple[int, ...] = ALL) -> SharedDomain:
    domain = SharedDomain.connect(World.of(), ranks)
    domain.reserve({rank: num_bytes for rank in ranks})
    return domain


def bytes_of(domain: SharedDomain, rank: int, num_bytes: int) -> bytes:
    return ctypes.string_at(domain.address(rank), num_bytes)


def barrier(domain: SharedDomain) -> None:
    domain.signals.advance()
    for peer in range(len(domain.ranks)):
        domain.signals.wait(peer, domain.signals.count(), WAIT_SECS)


def wait_error(domain: SharedDomain, rank: int, count: int, timeout_secs: float = WAIT_SECS) -> str:
    """What an executor would raise when it waits for ``rank``."""
    try:
        domain.signals.wait(domain.ranks.index(rank), count, timeout_secs)
    except _C.PeerError as error:
        return str(domain.comm_error(error, "step 1"))
    return "none"


# --- memory and signals -------------------------------------------------------------------------


def check_bytes(domain: SharedDomain) -> None:
    """Check that all ranks read each other's bytes."""
    domain.arena(10)[:] = bytes([domain.rank + 1] * 10)
    barrier(domain)
    for peer in domain.ranks:
        assert bytes_of(domain, peer, 10) == bytes([peer + 1] * 10)


@pytest.mark.parametrize("ranks", [ALL, (3, 0, 2)])
@on_ranks(NUM_RANKS)
def test_ranks_read_each_others_bytes_in_a_domain_of_any_order(
    rank: int, ranks: tuple[int, ...]
) -> None:
    if rank in ranks:
        domain = domain_of(10, ranks)
        check_bytes(domain)
        domain.close()


@on_ranks(NUM_RANKS)
def test_bytes_written_before_advance_are_seen_after_wait(rank: int) -> None:
    domain = domain_of(5000)
    for i in range(200):
        written = bytes([i % 251] * 5000)
        domain.arena(5000)[:] = written
        barrier(domain)
        assert all(bytes_of(domain, peer, 5000) == written for peer in ALL)
        barrier(domain)
    domain.close()


@on_ranks(NUM_RANKS)
def test_growth_keeps_contents_and_old_views_show_new_writes(rank: int) -> None:
    domain = domain_of(100)
    old = domain.arena(100)
    old[:] = bytes([rank + 1] * 100)
    before = [domain.address(peer) for peer in ALL]
    domain.reserve(dict.fromkeys(ALL, 50))
    assert before == [domain.address(peer) for peer in ALL]
    domain.reserve({0: 3 << 20, 3: 100_000})
    domain.arena(100)[99] = 77
    barrier(domain)
    for peer in ALL:
        assert bytes_of(domain, peer, 100) == bytes([peer + 1] * 99 + [77])
    assert bytes(old) == bytes([rank + 1] * 99 + [77])
    domain.close()


@on_ranks(NUM_RANKS)
def test_memory_stays_mapped_as_long_as_it_is_held(rank: int) -> None:
    """An earlier memory of the domain, after its arenas grew, and after its end."""
    domain = domain_of(100)
    memory = domain.memory
    memory.own[:100] = rank + 1
    domain.reserve(dict.fromkeys(ALL, 3 << 20))
    assert memory.version != domain.memory.version
    barrier(domain)
    domain.close()
    assert domain.memory.addresses == [0] * NUM_RANKS
    for peer, address in enumerate(memory.addresses):
        assert ctypes.string_at(address + 90, 10) == bytes([peer + 1] * 10)


@on_ranks(NUM_RANKS)
def test_rank_may_close_after_its_last_advance(rank: int) -> None:
    domain = domain_of()
    domain.signals.advance()
    if rank != 1:
        time.sleep(0.2)
        assert wait_error(domain, 1, 1) == "none"
    domain.close()


# --- memory that is refused ---------------------------------------------------------------------


@on_ranks(NUM_RANKS)
def test_failed_reservation_on_one_rank_is_an_error_on_every_rank(rank: int) -> None:
    domain = domain_of(5000)
    domain.arena(1)[:] = bytes([rank])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    assert error_of(lambda: domain.reserve(dict.fromkeys(ALL, 2 << 20))) == (
        "SharedMemoryError: reserving shared memory on ranks (0:4): rank 2 cannot reserve 2097152 "
        "bytes: File too large; raise its limit on file size (ulimit -f)."
    )
    assert domain.num_bytes(0) == 8192
    domain.reserve(dict.fromkeys(ALL, 1 << 19))
    barrier(domain)
    assert b"".join(bytes_of(domain, peer, 1) for peer in ALL) == bytes(ALL)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    domain.close()


@on_ranks(NUM_RANKS)
def test_failed_mapping_on_one_rank_is_an_error_on_every_rank(rank: int) -> None:
    domain = domain_of(5000)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # Room for the stacks of some threads, which talk to the store; a stack has 8 MiB.
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (40 << 20), before[1]))
    error = error_of(lambda: domain.reserve({3: 64 << 20}))
    resource.setrlimit(resource.RLIMIT_AS, before)
    domain.reserve({3: 10_000})
    assert domain.num_bytes(3) == 12288
    domain.close()
    assert error.startswith("SharedMemoryError: reserving shared memory on ranks (0:4): rank 1")
    assert "Cannot allocate memory; free memory" in error


def next_fd() -> int:
    """The lowest file descriptor that is free."""
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    return fd


@pytest.mark.parametrize("num_more", [0, 1, 4, 11])
@on_ranks(NUM_RANKS)
def test_failed_connection_on_one_rank_is_an_error_on_every_rank(rank: int, num_more: int) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd() + num_more, before[1]))
    start = time.monotonic()
    error = error_of(lambda: SharedDomain.connect(World.of(), ALL).close())
    assert time.monotonic() - start < SOON_SECS, "nobody waits for a rank that gave up"
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert error == (
        "SharedMemoryError: sharing memory on ranks (0:4): rank 2 cannot share memory: "
        "Too many open files; raise its limit of open files (ulimit -n)."
    )
    domain_of(1).close()


@on_ranks(NUM_RANKS, is_last=True)
def test_ranks_that_reserve_different_sizes_break_the_domain(rank: int) -> None:
    domain = domain_of()
    assert error_of(lambda: domain.reserve({0: 5000 if rank == 2 else 1})) == (
        "CommError: reserving shared memory on ranks (0:4): ranks disagree about bytes: rank 0 "
        "asks for [4096, 0, 0, 0], rank 2 for [8192, 0, 0, 0]."
    )
    failed = "CommError: process group '0' failed in an earlier call: CommError: reserving"
    again = error_of(lambda: domain.reserve({0: 1}))
    assert again.startswith(failed), "a broken group stays broken"
    domain.close()


# --- ranks that are lost ------------------------------------------------------------------------


def die(how: int = signal.SIGKILL) -> None:
    os.kill(os.getpid(), how)


@pytest.mark.parametrize(
    "how, by_reserve", [(signal.SIGKILL, False), (signal.SIGSEGV, False), (signal.SIGKILL, True)]
)
@on_ranks(NUM_RANKS, dying=[2])
def test_a_rank_that_dies_is_named_by_all_at_once(rank: int, how: int, by_reserve: bool) -> None:
    """The others learn it when they wait for it, or reserve memory."""
    domain = domain_of()
    barrier(domain)
    if rank == 2:
        time.sleep(0.3)
        die(how)
    start = time.monotonic()
    if by_reserve:
        # The rank that notices the death first reports it to the others.
        error = error_of(lambda: domain.reserve(dict.fromkeys(ALL, 1)))
        assert error.startswith("CommError: reserving shared memory on ranks (0:4)")
        assert "rank 2 died" in error
    else:
        named = f"step 1 on ranks (0:4), rank {rank}: rank 2 died (its process ended"
        assert wait_error(domain, 2, 2).startswith(named)
        assert wait_error(domain, rank, 0).startswith(named), "a broken domain stays broken"
    assert time.monotonic() - start < SOON_SECS
    domain.close()


def chain_of_waits(rank: int, timeout_secs: float, last_dies: bool) -> None:
    """Every rank waits for the next one; the last one does nothing, or dies."""
    domain = domain_of()
    barrier(domain)
    start = time.monotonic()
    if rank == ALL[-1]:
        if last_dies:
            die()
        time.sleep(timeout_secs + 0.5)
    else:
        error = wait_error(domain, rank + 1, 2, timeout_secs)
        assert (
            f"rank {rank}: rank 3 {'died' if last_dies else 'did not arrive within 1 s'}" in error
        )
        assert last_dies or time.monotonic() - start > 0.9
        assert time.monotonic() - start < SOON_SECS
    domain.close()


@pytest.mark.parametrize("last_dies", [True, False])
def test_every_rank_of_a_chain_of_waits_names_the_lost_rank(
    worlds: Worlds, last_dies: bool
) -> None:
    secs = WAIT_SECS if last_dies else 1.0
    dying = [3] if last_dies else []
    worlds(NUM_RANKS, secs).run(chain_of_waits, secs, last_dies, dying=dying)


@pytest.mark.parametrize("what", ["reserve", "domains"])
@on_ranks(NUM_RANKS, 1.0, is_last=True)
def test_a_rank_that_does_not_join_is_named(rank: int, what: str) -> None:
    domain = domain_of(ranks=ALL) if what == "reserve" else None
    if rank == 2:
        time.sleep(1.5)
    elif domain is not None:
        error = error_of(lambda: domain.reserve(dict.fromkeys(ALL, 1)))
        assert "ranks [2] did not join within 1 s" in error
    else:
        start = "CommError: finding ranks of one machine: ranks [2] did not join within 1 s."
        assert error_of(lambda: domains(World.of(), ALL)).startswith(start)


@on_ranks(NUM_RANKS)
def test_a_rank_that_gives_up_is_named_by_all(rank: int) -> None:
    domain = domain_of()
    barrier(domain)
    if rank == 0:
        time.sleep(0.2)
        domain.signals.fail()
    start = time.monotonic()
    error = wait_error(domain, 3 if rank != 3 else 1, 2)
    why = "rank 0 gave up; its own error says why." if rank else "this rank gave up in an earlier"
    assert f"rank {rank}: {why}" in error
    assert time.monotonic() - start < SOON_SECS
    domain.close()


@on_ranks(NUM_RANKS)
def test_interrupted_wait_raises_and_the_other_ranks_name_the_rank(rank: int) -> None:
    domain = domain_of()
    barrier(domain)
    if rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            wait_error(domain, 3, 2)
    else:
        assert "rank 1 gave up" in wait_error(domain, 3 if rank != 3 else 2, 2)
    domain.close()


@on_ranks(2)
def test_wait_on_a_closed_domain_raises_runtime_error(rank: int) -> None:
    domain = domain_of(1, (0, 1))
    barrier(domain)
    domain.close()
    domain.close()
    error = error_of(lambda: domain.signals.wait(0, 0, 1.0))
    assert error == "RuntimeError: this domain is closed."


# --- processes that are forked ------------------------------------------------------------------


@on_ranks(NUM_RANKS)
def test_a_forked_child_does_not_disturb_its_parent(rank: int) -> None:
    domain = domain_of(10)
    child = os.fork()
    if child == 0:
        # A child cannot change the domain of its parent.
        closed = "closed" in error_of(domain.signals.advance)
        domain.close()
        os._exit(0 if closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    check_bytes(domain)
    domain.close()


@on_ranks(NUM_RANKS, dying=[1])
def test_surviving_child_does_not_hide_the_death_of_its_parent(rank: int) -> None:
    domain = domain_of()
    barrier(domain)
    if rank == 1:
        if os.fork() == 0:
            time.sleep(3.0)
            os._exit(0)
        die()
    start = time.monotonic()
    assert "rank 1 died" in wait_error(domain, 1, 2)
    assert time.monotonic() - start < 2.0
    domain.close()


# --- who is on one machine ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "groups, expected",
    [
        (None, (ALL,)),
        ([[0, 1], [2, 3]], ((0, 1), (2, 3))),
        ([[3, 1], [0], [2]], ((0,), (1, 3), (2,))),
        ([[1, 2]], ((0,), (1, 2), (3,))),
    ],
)
@on_ranks(NUM_RANKS)
def test_ranks_of_one_machine_are_one_domain_unless_groups_separate_them(
    rank: int, groups: list[list[int]] | None, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert domains(World.of(), ALL, groups) == expected


@pytest.mark.parametrize(
    "reached, expected",
    [
        ({0: {1, 2}, 1: {0, 2}, 2: {0, 1}}, ((0, 1, 2),)),
        ({0: {2}, 1: {2}, 2: {0, 1}}, ((0, 2), (1,))),  # not transitive
        ({0: {1}, 1: set(), 2: set()}, ((0,), (1,), (2,))),  # not mutual
        ({5: {7}, 6: {8}, 7: {5}, 8: {6}}, ((5, 7), (6, 8))),
    ],
)
def test_domains_are_sets_of_ranks_that_reach_each_other_mutually(
    reached: dict[int, set[int]], expected: tuple[tuple[int, ...], ...]
) -> None:
    assert partition({rank: frozenset(r) for rank, r in reached.items()}) == expected


@pytest.mark.usefixtures("network_namespaces")
@on_ranks(NUM_RANKS, is_last=True)
def test_ranks_in_different_network_namespaces_are_different_domains(rank: int) -> None:
    """As two containers with one host name: ranks 0 and 3 in this network, 1 and 2 in their own."""
    if rank in (1, 2):
        # Connections that are open stay; the store's is.
        libc("unshare", CLONE_NEWNET)
    assert domains(World.of(), ALL) == ((0, 3), (1,), (2,))


@pytest.mark.usefixtures("mount_namespaces")
@on_ranks(NUM_RANKS, is_last=True)
def test_domain_works_without_dev_shm(rank: int) -> None:
    hide("/dev/shm")
    with pytest.raises(OSError, match="Read-only"):
        Path("/dev/shm/probe").write_text("x")
    domain = domain_of(10)
    check_bytes(domain)
    domain.close()


# --- nothing is left ----------------------------------------------------------------------------


def held() -> tuple[int, int, list[str]]:
    """Numbers of open descriptors and of mapped segments, and the files in /dev/shm."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return (
        len(os.listdir("/proc/self/fd")),
        sum("memfd:rvdcomm" in line for line in maps),
        sorted(os.listdir("/dev/shm")),
    )


def succeed() -> None:
    domain = domain_of(1000)
    domain.reserve(dict.fromkeys(ALL, 1 << 20))
    barrier(domain)
    domain.close()


def fail_to_reserve() -> None:
    domain = domain_of(1000)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    with pytest.raises(SharedMemoryError):
        domain.reserve(dict.fromkeys(ALL, 2 << 20))
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    barrier(domain)
    domain.close()


def fail_to_connect() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd() + 6, before[1]))
    with pytest.raises(CommError):
        SharedDomain.connect(World.of(), ALL)
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("use", [succeed, fail_to_reserve, fail_to_connect])
@on_ranks(NUM_RANKS)
def test_closed_domain_leaves_no_descriptors_mappings_or_files(
    rank: int, use: Callable[[], None]
) -> None:
    domain_of(1).close()  # opens what stays open: of the store and of modules
    before = held()
    use()
    use()
    assert held() == before
    assert before[1] == 1  # the pool of the process
