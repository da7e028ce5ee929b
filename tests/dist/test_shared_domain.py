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
from typing import Any

import pytest

pytest.importorskip("rvdcomm._C", reason="the extension is not built")

from rvdcomm import _C
from rvdcomm.errors import CommError
from rvdcomm.run.shared_memory.domain import SharedDomain, SharedMemoryError, domains
from rvdcomm.run.shared_memory.rendezvous import partition
from rvdcomm.run.world import World
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


def write_and_read(rank: int) -> list[bytes]:
    domain = domain_of(10)
    domain.arena(10)[:] = bytes([rank + 1] * 10)
    barrier(domain)
    found = [bytes_of(domain, peer, 10) for peer in ALL]
    domain.close()
    return found


def test_ranks_read_each_others_bytes(worlds: Worlds) -> None:
    expected = [bytes([rank + 1] * 10) for rank in ALL]
    assert worlds(NUM_RANKS).run(write_and_read) == [expected] * NUM_RANKS


def write_rounds(rank: int, num_rounds: int, num_bytes: int) -> int:
    domain = domain_of(num_bytes)
    num_torn = 0
    for i in range(num_rounds):
        domain.arena(num_bytes)[:] = bytes([i % 251] * num_bytes)
        barrier(domain)
        found = [bytes_of(domain, peer, num_bytes) for peer in ALL]
        num_torn += sum(each != bytes([i % 251] * num_bytes) for each in found)
        barrier(domain)
    domain.close()
    return num_torn


def test_bytes_written_before_advance_are_seen_after_wait(worlds: Worlds) -> None:
    assert worlds(NUM_RANKS).run(write_rounds, 300, 5000) == [0] * NUM_RANKS


def connect_in_any_order(rank: int, ranks: tuple[int, ...]) -> list[bytes] | None:
    if rank not in ranks:
        return None
    domain = domain_of(1, ranks)
    domain.arena(1)[:] = bytes([rank])
    barrier(domain)
    found = [bytes_of(domain, peer, 1) for peer in ranks]
    domain.close()
    return found


def test_an_domain_may_have_some_ranks_in_any_order(worlds: Worlds) -> None:
    found = worlds(NUM_RANKS).run(connect_in_any_order, (3, 0, 2))
    expected = [b"\x03", b"\x00", b"\x02"]
    assert found == [expected, None, expected, expected]


def grow(rank: int) -> tuple[bool, list[bytes], bytes]:
    domain = domain_of(100)
    old = domain.arena(100)
    old[:] = bytes([rank + 1] * 100)
    before = [domain.address(peer) for peer in ALL]
    domain.reserve(dict.fromkeys(ALL, 50))
    unchanged = before == [domain.address(peer) for peer in ALL]
    domain.reserve({0: 3 << 20, 3: 100_000})
    domain.arena(100)[99] = 77
    barrier(domain)
    found = [bytes_of(domain, peer, 1) + bytes_of(domain, peer, 100)[99:] for peer in ALL]
    kept = bytes(old[98:])
    domain.close()
    return unchanged, found, kept + bytes(old[:1])


def test_growth_keeps_contents_and_old_views_show_new_writes(worlds: Worlds) -> None:
    found = [bytes([rank + 1, 77]) for rank in ALL]
    expected = [(True, found, bytes([rank + 1, 77, rank + 1])) for rank in ALL]
    assert worlds(NUM_RANKS).run(grow) == expected


def hold_memory(rank: int) -> list[bytes]:
    """What an earlier memory of the domain holds after its arenas grew, and after its end."""
    domain = domain_of(100)
    memory = domain.memory
    memory.own[:100] = rank + 1
    domain.reserve(dict.fromkeys(ALL, 3 << 20))
    assert memory.version != domain.memory.version
    barrier(domain)
    domain.close()
    assert domain.memory.addresses == [0] * NUM_RANKS
    return [ctypes.string_at(address + 90, 10) for address in memory.addresses]


def test_memory_stays_mapped_as_long_as_it_is_held(worlds: Worlds) -> None:
    expected = [bytes([rank + 1] * 10) for rank in ALL]
    assert worlds(NUM_RANKS).run(hold_memory) == [expected] * NUM_RANKS


def leave_early(rank: int) -> str:
    domain = domain_of()
    domain.signals.advance()
    if rank != 1:
        time.sleep(0.2)
        error = wait_error(domain, 1, 1)
        domain.close()
        return error
    domain.close()
    return "none"


def test_rank_may_close_after_its_last_advance(worlds: Worlds) -> None:
    assert worlds(NUM_RANKS).run(leave_early) == ["none"] * NUM_RANKS


# --- memory that is refused ---------------------------------------------------------------------


def exceed_file_size(rank: int) -> tuple[str, int, bytes]:
    domain = domain_of(5000)
    domain.arena(1)[:] = bytes([rank])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, before[1]))
    error = error_of(lambda: domain.reserve(dict.fromkeys(ALL, 2 << 20)))
    unchanged = domain.num_bytes(0)
    domain.reserve(dict.fromkeys(ALL, 1 << 19))
    barrier(domain)
    found = b"".join(bytes_of(domain, peer, 1) for peer in ALL)
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    domain.close()
    return error, unchanged, found


def test_failed_reservation_on_one_rank_is_an_error_on_every_rank(worlds: Worlds) -> None:
    error = (
        "SharedMemoryError: reserving shared memory on ranks (0:4): rank 2 cannot reserve 2097152 "
        "bytes: File too large; raise its limit on file size (ulimit -f)."
    )
    results = worlds(NUM_RANKS).run(exceed_file_size)
    assert results == [(error, 8192, bytes(ALL))] * NUM_RANKS


def exceed_address_space(rank: int) -> tuple[str, int]:
    domain = domain_of(5000)
    before = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        # Room for the stacks of some threads, which talk to the store; a stack has 8 MiB.
        resource.setrlimit(resource.RLIMIT_AS, (in_use + (40 << 20), before[1]))
    error = error_of(lambda: domain.reserve({3: 64 << 20}))
    resource.setrlimit(resource.RLIMIT_AS, before)
    domain.reserve({3: 10_000})
    size = domain.num_bytes(3)
    domain.close()
    return error, size


def test_failed_mapping_on_one_rank_is_an_error_on_every_rank(worlds: Worlds) -> None:
    results = worlds(NUM_RANKS).run(exceed_address_space)
    assert results == [results[0]] * NUM_RANKS
    error, size = results[0]
    assert error.startswith("SharedMemoryError: reserving shared memory on ranks (0:4): rank 1")
    assert "Cannot allocate memory; free memory" in error
    assert size == 12288


def next_fd() -> int:
    """The lowest file descriptor that is free."""
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    return fd


def exceed_open_files(rank: int, num_more: int) -> tuple[str, str, float]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if rank == 2:
        resource.setrlimit(resource.RLIMIT_NOFILE, (next_fd() + num_more, before[1]))
    start = time.monotonic()
    error = error_of(lambda: SharedDomain.connect(World.of(), ALL).close())
    secs = time.monotonic() - start
    resource.setrlimit(resource.RLIMIT_NOFILE, before)
    again = error_of(lambda: domain_of(1).close())
    return error, again, secs


@pytest.mark.parametrize("num_more", [0, 1, 4, 11])
def test_failed_connection_on_one_rank_is_an_error_on_every_rank(
    worlds: Worlds, num_more: int
) -> None:
    error = (
        "SharedMemoryError: sharing memory on ranks (0:4): rank 2 cannot share memory: "
        "Too many open files; raise its limit of open files (ulimit -n)."
    )
    for result in worlds(NUM_RANKS).run(exceed_open_files, num_more):
        assert result[:2] == (error, "none")
        assert result[2] < SOON_SECS, "nobody waits for a rank that gave up"


def disagree(rank: int) -> tuple[str, str]:
    domain = domain_of()
    error = error_of(lambda: domain.reserve({0: 5000 if rank == 2 else 1}))
    again = error_of(lambda: domain.reserve({0: 1}))
    domain.close()
    return error, again


def test_ranks_that_reserve_different_sizes_break_the_domain(worlds: Worlds) -> None:
    error = (
        "CommError: reserving shared memory on ranks (0:4): ranks disagree about bytes: rank 0 "
        "asks for [4096, 0, 0, 0], rank 2 for [8192, 0, 0, 0]."
    )
    world = worlds(NUM_RANKS)
    results = world.run(disagree)
    world.stop()
    assert [result[0] for result in results] == [error] * NUM_RANKS
    failed = "CommError: process group '0' failed in an earlier call: CommError: reserving"
    assert all(again.startswith(failed) for _, again in results), "a broken group stays broken"


# --- ranks that are lost ------------------------------------------------------------------------


def one_dies(rank: int, victim: int, how: signal.Signals) -> tuple[str, str, float]:
    domain = domain_of()
    barrier(domain)
    if rank == victim:
        time.sleep(0.3)
        os.kill(os.getpid(), how)
    start = time.monotonic()
    error = wait_error(domain, victim, 2)
    secs = time.monotonic() - start
    again = wait_error(domain, rank, 0)
    domain.close()
    return error, again, secs


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_rank_that_dies_is_named_by_all_at_once(worlds: Worlds, how: signal.Signals) -> None:
    results = worlds(NUM_RANKS).run(one_dies, 2, how, dying=[2])
    for rank, result in enumerate(results):
        if rank != 2:
            error, again, secs = result
            start = f"step 1 on ranks (0:4), rank {rank}: rank 2 died (its process ended"
            assert error.startswith(start)
            assert again.startswith(start), "a broken domain stays broken"
            assert secs < SOON_SECS


def chain_of_waits(rank: int, timeout_secs: float, last_dies: bool) -> tuple[str, float]:
    """Every rank waits for the next one; the last one does nothing, or dies."""
    domain = domain_of()
    barrier(domain)
    start = time.monotonic()
    if rank == ALL[-1]:
        if last_dies:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(timeout_secs + 0.5)
        error = "none"
    else:
        error = wait_error(domain, rank + 1, 2, timeout_secs)
    secs = time.monotonic() - start
    domain.close()
    return error, secs


def test_every_rank_of_a_chain_of_waits_names_the_dead_rank(worlds: Worlds) -> None:
    results = worlds(NUM_RANKS).run(chain_of_waits, WAIT_SECS, True, dying=[3])
    for rank, (error, secs) in enumerate(results[:3]):
        assert f"rank {rank}: rank 3 died" in error
        assert secs < SOON_SECS


def test_every_rank_of_a_chain_of_waits_names_the_late_rank(worlds: Worlds) -> None:
    results = worlds(NUM_RANKS, 1.0).run(chain_of_waits, 1.0, False)
    for rank, (error, secs) in enumerate(results[:3]):
        assert f"rank {rank}: rank 3 did not arrive within 1 s" in error
        assert 0.9 < secs < SOON_SECS


def one_dies_before_reserve(rank: int) -> tuple[str, float] | None:
    domain = domain_of()
    barrier(domain)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = error_of(lambda: domain.reserve(dict.fromkeys(ALL, 1)))
    secs = time.monotonic() - start
    domain.close()
    return error, secs


def test_a_rank_that_dies_is_named_by_reserve(worlds: Worlds) -> None:
    results = worlds(NUM_RANKS).run(one_dies_before_reserve, dying=[1])
    for rank in (0, 2, 3):
        error, secs = results[rank]
        # The rank that notices the death first reports it to the others.
        assert error.startswith("CommError: reserving shared memory on ranks (0:4)")
        assert "rank 1 died" in error
        assert secs < SOON_SECS


def one_skips_reserve(rank: int) -> str:
    domain = domain_of()
    if rank == 1:
        time.sleep(1.5)
        error = "none"
    else:
        error = error_of(lambda: domain.reserve(dict.fromkeys(ALL, 1)))
    domain.close()
    return error


def test_a_rank_that_does_not_reserve_is_named(worlds: Worlds) -> None:
    world = worlds(NUM_RANKS, 1.0)
    results = world.run(one_skips_reserve)
    world.stop()
    assert all("ranks [1] did not join within 1 s" in results[rank] for rank in (0, 2, 3))


def one_fails(rank: int) -> tuple[str, float]:
    domain = domain_of()
    barrier(domain)
    if rank == 0:
        time.sleep(0.2)
        domain.signals.fail()
    start = time.monotonic()
    error = wait_error(domain, 3 if rank != 3 else 1, 2)
    secs = time.monotonic() - start
    domain.close()
    return error, secs


def test_a_rank_that_gives_up_is_named_by_all(worlds: Worlds) -> None:
    results = worlds(NUM_RANKS).run(one_fails)
    assert "rank 0: this rank gave up in an earlier call" in results[0][0]
    for rank in (1, 2, 3):
        assert f"rank {rank}: rank 0 gave up; its own error says why." in results[rank][0]
        assert results[rank][1] < SOON_SECS


def one_is_interrupted(rank: int) -> str:
    domain = domain_of()
    barrier(domain)
    if rank == 1:
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        error = wait_error(domain, 3 if rank != 3 else 2, 2)
    except KeyboardInterrupt:
        error = "interrupted"
    domain.close()
    return error


def test_interrupted_wait_raises_and_the_other_ranks_name_the_rank(worlds: Worlds) -> None:
    results = worlds(NUM_RANKS).run(one_is_interrupted)
    assert results[1] == "interrupted"
    assert all("rank 1 gave up" in results[rank] for rank in (0, 2, 3))


def use_after_close(rank: int) -> str:
    domain = domain_of(1, (0, 1))
    barrier(domain)
    domain.close()
    domain.close()
    return error_of(lambda: domain.signals.wait(0, 0, 1.0))


def test_wait_on_a_closed_domain_raises_runtime_error(worlds: Worlds) -> None:
    assert worlds(2).run(use_after_close) == ["RuntimeError: this domain is closed."] * 2


# --- processes that are forked ------------------------------------------------------------------


def fork_and_go_on(rank: int) -> tuple[int, bytes]:
    domain = domain_of(1)
    domain.arena(1)[:] = bytes([rank])
    child = os.fork()
    if child == 0:
        # A child cannot change the domain of its parent.
        closed = "closed" in error_of(domain.signals.advance)
        domain.close()
        os._exit(0 if closed else 1)
    status = os.waitpid(child, 0)[1]
    barrier(domain)
    found = b"".join(bytes_of(domain, peer, 1) for peer in ALL)
    domain.close()
    return status, found


def test_a_forked_child_does_not_disturb_its_parent(worlds: Worlds) -> None:
    assert worlds(NUM_RANKS).run(fork_and_go_on) == [(0, bytes(ALL))] * NUM_RANKS


def fork_and_die(rank: int) -> str:
    domain = domain_of()
    barrier(domain)
    if rank == 1:
        if os.fork() == 0:
            time.sleep(3.0)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    start = time.monotonic()
    error = wait_error(domain, 1, 2)
    assert time.monotonic() - start < 2.0
    domain.close()
    return error


def test_surviving_child_does_not_hide_the_death_of_its_parent(worlds: Worlds) -> None:
    results = worlds(NUM_RANKS).run(fork_and_die, dying=[1])
    assert all("rank 1 died" in results[rank] for rank in (0, 2, 3))


# --- who is on one machine ----------------------------------------------------------------------


def find_domains(rank: int, groups: list[list[int]] | None) -> tuple[tuple[int, ...], ...]:
    return domains(World.of(), ALL, groups)


@pytest.mark.parametrize(
    "groups, expected",
    [
        (None, (ALL,)),
        ([[0, 1], [2, 3]], ((0, 1), (2, 3))),
        ([[3, 1], [0], [2]], ((0,), (1, 3), (2,))),
        ([[1, 2]], ((0,), (1, 2), (3,))),
    ],
)
def test_ranks_of_one_machine_are_one_domain_unless_groups_separate_them(
    worlds: Worlds, groups: list[list[int]] | None, expected: tuple[tuple[int, ...], ...]
) -> None:
    assert worlds(NUM_RANKS).run(find_domains, groups) == [expected] * NUM_RANKS


def one_does_not_ask(rank: int) -> str:
    return error_of(lambda: domains(World.of(), ALL)) if rank != 2 else "none"


def test_rank_that_does_not_call_domains_is_named(worlds: Worlds) -> None:
    world = worlds(NUM_RANKS, 1.0)
    results = world.run(one_does_not_ask)
    world.stop()
    start = "CommError: finding ranks of one machine: ranks [2] did not join within 1 s."
    assert all(results[rank].startswith(start) for rank in (0, 1, 3))


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


def part_networks(rank: int) -> tuple[tuple[int, ...], ...]:
    """As two containers with one host name: ranks 0 and 3 in this network, 1 and 2 in their own."""
    if rank in (1, 2):
        # Connections that are open stay; the store's is.
        libc("unshare", CLONE_NEWNET)
    return domains(World.of(), ALL)


def test_ranks_in_different_network_namespaces_are_different_domains(worlds: Worlds) -> None:
    if not may_unshare(CLONE_NEWNET):
        pytest.skip("needs the right to make network namespaces (root)")
    world = worlds(NUM_RANKS)
    try:
        assert world.run(part_networks) == [((0, 3), (1,), (2,))] * NUM_RANKS
    finally:
        world.stop()


def without_dev_shm(rank: int) -> tuple[bool, list[bytes]]:
    libc("unshare", CLONE_NEWNS)
    libc("mount", None, b"/", None, MS_PRIVATE_ALL, None)
    libc("mount", b"none", b"/dev/shm", b"tmpfs", 1, b"size=4k")  # read-only
    try:
        Path("/dev/shm/probe").write_text("x")
    except OSError:
        return True, write_and_read(rank)
    return False, []


def test_domain_works_without_dev_shm(worlds: Worlds) -> None:
    if not may_unshare(CLONE_NEWNS):
        pytest.skip("needs the right to make mount namespaces (root)")
    world = worlds(NUM_RANKS)
    expected = (True, [bytes([rank + 1] * 10) for rank in ALL])
    try:
        assert world.run(without_dev_shm) == [expected] * NUM_RANKS
    finally:
        world.stop()


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


def use_and_count(rank: int, use: Callable[[], None]) -> tuple[Any, Any]:
    domain_of(1).close()  # opens what stays open: of the store and of modules
    before = held()
    use()
    use()
    return before, held()


@pytest.mark.parametrize("use", [succeed, fail_to_reserve, fail_to_connect])
def test_closed_domain_leaves_no_descriptors_mappings_or_files(
    worlds: Worlds, use: Callable[[], None]
) -> None:
    for before, after in worlds(NUM_RANKS).run(use_and_count, use):
        assert before == after
        assert before[1] == 1  # the pool of the process
