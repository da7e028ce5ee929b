"""A group that failed stays failed on every rank; no call returns the data of another call.

The ranks compare their requests only in the first call of a transition. Here they differ in a later
call, in which nothing is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm import native
from tests.covering import each_value
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.world import Worlds

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted"),
]

EXECUTORS = ("dist", "peer")
NUM_RANKS = 4
TIMEOUT_SECS = 3.0
SHAPE = (54, 36)
PAIRS = {
    "reduce": ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
    "gather": ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"),
    "turn": ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
    "turn back": ("R(1)V(1)D(1,4)", "R(1)V(1)D(4,1)"),
    "scatter": ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)"),
}


def layouts(name: str) -> tuple[rv.Layout, rv.Layout]:
    src, dst = PAIRS[name]
    return rv.Layout(SHAPE, src), rv.Layout(SHAPE, dst)


def call(rank: int, name: str, executor: str, seed: int, group: Any = None) -> Any:
    src, dst = layouts(name)
    shard = shard_of(rank, src, seed)
    return rv.redistribute(shard, src, dst, group=group, executor=executor).clone()


def attempt(made: Callable[[], Any]) -> tuple[str, Any]:
    """The error of a call, and its result."""
    found: list[Any] = []
    error = error_of(lambda: found.append(made()))
    return error, (found[0].numpy() if found else None)


def hurried_group() -> Any:
    """A group with a short timeout; ranks meet in the default group, whose timeout is longer."""
    return dist.new_group(list(range(NUM_RANKS)), timeout=timedelta(seconds=TIMEOUT_SECS))


def differ_in_a_later_call(rank: int, executor: str, names: list[str]) -> list[tuple[str, Any]]:
    """All ranks know all transitions; rank 3 makes another call than the others; all continue."""
    group = hurried_group()
    for name in sorted(set(names)):
        call(rank, name, executor, 0, group)
    dist.barrier()
    found = [attempt(partial(call, rank, names[rank == NUM_RANKS - 1], executor, 1, group))]
    dist.barrier()
    found += [attempt(partial(call, rank, names[0], executor, 2, group)) for _ in range(3)]
    dist.barrier()
    return [*found, attempt(partial(call, rank, names[0], executor, 3, hurried_group()))]


@each_value(other=["gather", "turn back", "scatter", "reduce"], executor=EXECUTORS)
def test_ranks_in_different_later_calls_never_get_data_of_another_call(
    worlds: Worlds, executor: str, other: str
) -> None:
    world = worlds(NUM_RANKS)
    of_ranks = world.run(differ_in_a_later_call, executor, ["turn", other])
    world.stop()
    src, dst = layouts("turn")
    for rank, found in enumerate(of_ranks):
        name = "turn" if rank != NUM_RANKS - 1 else other
        if found[0][0] == "none":
            assert_own_data(rank, found[0][1], name, seed=1)
        for error, result in found[1:4]:
            if error == "none":
                assert_own_data(rank, result, "turn", seed=2)
        assert found[3][0].startswith("CommError: "), "a failed group is failed on every rank"
    anew = [found[4] for found in of_ranks]
    assert [error for error, _ in anew] == ["none"] * NUM_RANKS
    assert faults_of([result for _, result in anew], src, dst, seed=3) == []


def assert_own_data(rank: int, result: Any, name: str, seed: int) -> None:
    """The result is what ``simulate`` gives this rank for its own call."""
    src, dst = layouts(name)
    shards = {r: shard_of(r, src, seed).numpy() for r in src.ranks}
    wanted = rv.simulate(rv.plan(src, dst), shards).shards[rank]
    assert torch.equal(torch.from_numpy(result), torch.from_numpy(wanted)), f"rank {rank}: {name}"


def inferred(rank: int, executor: str, count: int) -> list[str]:
    """Rank 3 misses one of the calls whose shape is inferred, and makes the next one."""
    group, shard = hurried_group(), torch.full((2,), float(rank))

    def call_with(tensor: Tensor) -> str:
        texts = "R(1)V(1)D(4)", "R(4)V(1)D(1)"
        made = partial(rv.redistribute, tensor, *texts, group=group, executor=executor)
        return attempt(made)[0]

    errors = [call_with(shard)]
    if rank != NUM_RANKS - 1:
        errors.append(call_with(shard))
    dist.barrier()
    return errors + [call_with(shard + 1) for _ in range(count)]


@pytest.mark.parametrize("executor", EXECUTORS)
def test_group_is_failed_after_a_rank_missed_a_call_with_inferred_shape(
    worlds: Worlds, executor: str
) -> None:
    world = worlds(NUM_RANKS)
    of_ranks = world.run(inferred, executor, 2)
    world.stop()
    for errors in of_ranks:
        assert errors[0] == "none"
        assert all(error.startswith("CommError: ") for error in errors[1:]), errors
