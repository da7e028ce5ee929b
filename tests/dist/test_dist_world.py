"""Laws of the worlds of processes that the other files use."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch.distributed as dist

from tests.dist.world import RUN_SECS, ProcessWorld, Worlds

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


def test_every_rank_runs_in_a_process_of_its_own_which_later_calls_reuse(
    world: ProcessWorld,
) -> None:
    results = world.run(rank_and_pid)
    assert [result[:2] for result in results] == [(0, 0), (1, 1), (2, 2)]
    assert len({pid for _, _, pid in results} | {os.getpid()}) == 4
    assert world.run(rank_and_pid) == results


@pytest.mark.parametrize(
    "failure, error, message",
    [
        (fail_on, LookupError, "mist"),
        (hang_on, TimeoutError, r"ranks \[1\] did not return in 1 s"),
        (die_on, ChildProcessError, "rank 1: the process ended with exit code 3"),
    ],
)
def test_failure_of_a_rank_is_raised_and_processes_are_replaced(
    world: ProcessWorld, failure: Any, error: type[Exception], message: str
) -> None:
    before = pids(world)
    with pytest.raises(error, match=message) as caught:
        world.run(failure, 1, timeout_secs=1.0 if failure is hang_on else RUN_SECS)
    if failure is fail_on:
        (note,) = caught.value.__notes__
        assert note.startswith("on rank 1 of 3:\nTraceback")
        assert "in fail_on" in note
    assert not any(map(lives, before))
    assert not before & pids(world)


def test_result_of_a_rank_that_dies_as_expected_is_none(world: ProcessWorld) -> None:
    assert world.run(die_on, 1, dying=[1]) == [0, None, 2]


def test_result_that_does_not_pickle_is_an_error(world: ProcessWorld) -> None:
    with pytest.raises((AttributeError, RuntimeError), match="pickle"):
        world.run(unpicklable)


def test_stop_ends_all_processes() -> None:
    world = ProcessWorld(2)
    before = pids(world)
    world.stop()
    assert not any(map(lives, before))
