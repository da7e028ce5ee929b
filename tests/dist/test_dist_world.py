"""Laws of the worlds of processes that the other files use."""

from __future__ import annotations

import os
import time

import pytest
import torch.distributed as dist

from tests.dist.world import ProcessWorld, Worlds

pytestmark = pytest.mark.dist


def rank_and_pid(rank: int) -> tuple[int, int, int]:
    return rank, dist.get_rank(), os.getpid()


def fail_on(rank: int, failing: int) -> None:
    if rank == failing:
        raise LookupError("mist")


def hang_on(rank: int, hanging: int) -> None:
    if rank == hanging:
        time.sleep(60)


def die_on(rank: int, dying: int) -> int:
    if rank == dying:
        os._exit(3)
    return rank


def unpicklable(rank: int) -> object:
    return lambda: rank


@pytest.fixture
def world(worlds: Worlds) -> ProcessWorld:
    return worlds(3)


def pids(world: ProcessWorld) -> set[int]:
    return {pid for _, _, pid in world.run(rank_and_pid)}


def lives(pid: int) -> bool:
    """Whether a process runs; a killed process may take a moment to end."""
    deadline = time.monotonic() + 2.0
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < deadline:
        time.sleep(0.01)
    return os.path.exists(f"/proc/{pid}")


def test_every_rank_runs_in_a_process_of_its_own(world: ProcessWorld) -> None:
    results = world.run(rank_and_pid)
    assert [result[:2] for result in results] == [(0, 0), (1, 1), (2, 2)]
    assert len({pid for _, _, pid in results} | {os.getpid()}) == 4


def test_processes_are_reused_by_later_calls(world: ProcessWorld) -> None:
    assert pids(world) == pids(world)


def test_error_of_a_rank_is_raised_with_rank_and_traceback(world: ProcessWorld) -> None:
    with pytest.raises(LookupError, match="mist") as caught:
        world.run(fail_on, 1)
    (note,) = caught.value.__notes__
    assert note.startswith("on rank 1 of 3:\nTraceback")
    assert "in fail_on" in note


def test_hang_raises_timeout_error_that_names_its_ranks(world: ProcessWorld) -> None:
    with pytest.raises(TimeoutError, match=r"ranks \[2\] did not return in 1 s"):
        world.run(hang_on, 2, timeout_secs=1.0)


def test_death_of_a_rank_is_an_error(world: ProcessWorld) -> None:
    with pytest.raises(ChildProcessError, match="rank 1: the process ended with exit code 3"):
        world.run(die_on, 1)


def test_result_of_a_rank_that_dies_as_expected_is_none(world: ProcessWorld) -> None:
    assert world.run(die_on, 1, dying=[1]) == [0, None, 2]


def test_result_that_does_not_pickle_is_an_error(world: ProcessWorld) -> None:
    with pytest.raises((AttributeError, RuntimeError), match="pickle"):
        world.run(unpicklable)


@pytest.mark.parametrize("failure", [fail_on, hang_on, die_on])
def test_processes_are_replaced_after_a_failure(world: ProcessWorld, failure: object) -> None:
    before = pids(world)
    with pytest.raises((LookupError, TimeoutError, ChildProcessError)):
        world.run(failure, 0, timeout_secs=0.3)
    assert not any(map(lives, before))
    assert not before & pids(world)


def test_stop_ends_all_processes() -> None:
    world = ProcessWorld(2)
    before = pids(world)
    world.stop()
    assert not any(map(lives, before))
