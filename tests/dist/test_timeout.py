"""``rv.timeout`` limits the calls of a block: they raise then, not after the group's timeout.

The tests only check that a call ends before the group's timeout, which is 20 s.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm.run.waiting import of_block
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import shard_of
from tests.dist.test_dist_errors import timed

pytestmark = [pytest.mark.dist, pytest.mark.alone]

LIMIT_SECS, GROUP_SECS = 0.3, 20.0
IN_BACKGROUND = ("background", "posted")
SHAPE = (8, 12)
SUM = rv.Layout(SHAPE, "R(1)V(2)D(1,1)"), rv.Layout(SHAPE, "R(2)V(1)D(1,1)")
GATHER = rv.Layout(SHAPE, "R(1)V(1)D(2,1)"), rv.Layout(SHAPE, "R(2)V(1)D(1,1)")
WHOLE = "R(1)V(1)D(1,1)"
SEND = rv.Layout(SHAPE, WHOLE, ranks=[0]), rv.Layout(SHAPE, WHOLE, ranks=[1])
EXECUTORS = ["dist", pytest.param("peer", marks=pytest.mark.native)]


def new_group() -> Any:
    """A group that only this test uses, because it fails."""
    return dist.new_group([0, 1], timeout=timedelta(seconds=GROUP_SECS))


def call(rank: int, way: str, executor: str, group: Any) -> Any:
    """One call of the kind that ``way`` names."""
    src, dst = {"sum": SUM, "posted": SEND}.get(way, GATHER)
    shard = shard_of(rank, src, 0)
    if way == "many":
        tensors = {} if shard is None else {"x": shard}
        return rv.redistribute_many(
            tensors, {"x": src}, {"x": dst}, executor=executor, group=group
        )["x"]
    return rv.redistribute(
        shard, src, dst, executor=executor, async_op=way in IN_BACKGROUND, group=group,
        dtype=torch.float32,
    )  # fmt: skip


@pytest.mark.parametrize(
    "way, executor, is_agreed",
    [
        ("gather", "dist", False),
        ("gather", "peer", True),
        ("sum", "peer", False),
        ("many", "dist", True),
        ("background", "peer", True),
        ("posted", "dist", True),
    ],
)
@on_ranks(2)
def test_call_in_a_timeout_block_raises_before_the_timeout_of_the_group(
    rank: int, way: str, executor: str, is_agreed: bool
) -> None:
    """Rank 0 comes too late."""
    group = new_group()
    if is_agreed:
        first = call(rank, way, executor, group)
        _ = first.wait() if way in IN_BACKGROUND else first
    if rank == 0:
        time.sleep(3 * LIMIT_SECS)
        return

    def limited() -> Any:
        with rv.timeout(LIMIT_SECS):
            found = call(rank, way, executor, group)
        # The limit is that of the block in which the call began.
        return found.wait() if way in IN_BACKGROUND else found

    waited = timed(limited)
    assert waited.error.startswith("CommError"), waited
    assert waited.secs < GROUP_SECS / 2


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(2)
def test_timeout_of_the_group_applies_outside_of_a_timeout_block(rank: int, executor: str) -> None:
    group = new_group()
    with rv.timeout(LIMIT_SECS * 20):
        call(rank, "gather", executor, group)
    if rank == 0:
        time.sleep(2 * LIMIT_SECS)
    # Outside of a block it is the group's timeout again.
    assert_moved(call(rank, "gather", executor, group), *GATHER)


def test_timeout_blocks_may_be_nested() -> None:
    with rv.timeout(2):
        with rv.timeout(1.5):
            assert of_block().total_seconds() == 1.5
        assert of_block().total_seconds() == 2
    assert of_block() is None


@pytest.mark.parametrize("secs", [1e-9, 9e-4, 1e-3])
def test_the_least_limit_is_a_millisecond(secs: float) -> None:
    with rv.timeout(secs):
        assert of_block() == timedelta(milliseconds=1)


@pytest.mark.parametrize("secs", [0, -1.0, float("nan"), "5", None, float("inf"), 1e300, 10**400])
def test_limits_that_are_not_numbers_above_0_are_rejected(secs: Any) -> None:
    with pytest.raises(rv.LayoutError, match="a number of seconds above 0"), rv.timeout(secs):
        pass
