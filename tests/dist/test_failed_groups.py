"""A group that failed stays failed on every rank; no call returns the data of another call.

The ranks compare their requests only in the first call of a transition. Here they differ in a later
call, in which nothing is compared.
"""

from __future__ import annotations

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
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, shard_of

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
    "turn": ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
    "turn back": ("R(1)V(1)D(1,4)", "R(1)V(1)D(4,1)"),
}


def layouts(name: str) -> tuple[rv.Layout, rv.Layout]:
    src, dst = PAIRS[name]
    return rv.Layout(SHAPE, src), rv.Layout(SHAPE, dst)


def call(rank: int, name: str, executor: str, seed: int, group: Any) -> tuple[str, Any]:
    """The error of a call, or "none", and its result."""
    src, dst = layouts(name)
    found: list[Any] = [None]

    def move() -> None:
        shard = shard_of(rank, src, seed)
        found[0] = rv.redistribute(shard, src, dst, group=group, executor=executor).clone()

    return error_of(move), found[0]


def hurried_group() -> Any:
    """A group with a short timeout; ranks meet in the default group, whose timeout is longer."""
    group = dist.new_group(list(range(NUM_RANKS)), timeout=timedelta(seconds=TIMEOUT_SECS))
    # No rank ends while others still connect.
    dist.barrier()
    return group


@each_value(other=["turn back", "reduce"], executor=EXECUTORS)
@on_ranks(NUM_RANKS)
def test_ranks_in_different_later_calls_never_get_data_of_another_call(
    rank: int, executor: str, other: str
) -> None:
    """All ranks know both transitions; rank 3 makes another call than the others; all continue."""
    group = hurried_group()
    for name in sorted({"turn", other}):
        call(rank, name, executor, 0, group)
    dist.barrier()
    name = other if rank == NUM_RANKS - 1 else "turn"
    attempts = [(name, 1, call(rank, name, executor, 1, group))]
    dist.barrier()
    attempts += [("turn", 2, call(rank, "turn", executor, 2, group)) for _ in range(3)]
    for name, seed, (error, result) in attempts:
        if error == "none":
            assert_own_data(rank, result, name, seed)
    assert error.startswith("CommError: "), "a failed group is failed on every rank"
    dist.barrier()
    error, anew = call(rank, "turn", executor, 3, hurried_group())
    assert error == "none"
    assert_moved(anew, *layouts("turn"), seed=3)


def assert_own_data(rank: int, result: Tensor, name: str, seed: int) -> None:
    """The result is what ``simulate`` gives this rank for its own call."""
    src, dst = layouts(name)
    shards = {r: shard_of(r, src, seed).numpy() for r in src.ranks}
    wanted = rv.simulate(rv.plan(src, dst), shards).shards[rank]
    assert torch.equal(result, torch.from_numpy(wanted)), f"rank {rank}: {name}"


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(NUM_RANKS)
def test_group_is_failed_after_a_rank_missed_a_call_with_inferred_shape(
    rank: int, executor: str
) -> None:
    """Rank 3 misses one of the calls whose shape is inferred, and makes the next one."""
    group, shard = hurried_group(), torch.full((2,), float(rank))
    texts = "R(1)V(1)D(4)", "R(4)V(1)D(1)"

    def error_with(tensor: Tensor) -> str:
        return error_of(partial(rv.redistribute, tensor, *texts, group=group, executor=executor))

    assert error_with(shard) == "none"
    errors = [error_with(shard)] if rank != NUM_RANKS - 1 else []
    dist.barrier()
    errors += [error_with(shard + 1) for _ in range(2)]
    assert all(error.startswith("CommError: ") for error in errors), errors
