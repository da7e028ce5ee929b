"""A step that fails on one process: all learn it at once, and none trains on with other data."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
import superscaler_core as ss
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import error_of
from tests.dist.world import Worlds
from tests.superscaler_core.training.test_step_guard import (
    PLANS,
    bad_batch,
    batch,
    loop,
    model,
    sgd,
)

pytestmark = pytest.mark.dist

EXECUTORS = ("auto", "dist")
TIMEOUT_SECS = 20.0
OUT_OF_RANGE = "IndexError: index out of range in self"
AT_ONCE_SECS = 10.0
"""Far below the timeout: a busy machine may take some of it."""


HYBRID = {"hybrid": {"pp": 2, "microbatches": 2}}


@pytest.mark.parametrize(
    "plan, num_ranks, executor",
    [
        (plan, 4 if plan == "hybrid" else 2, EXECUTORS[i % 2])
        for i, plan in enumerate(PLANS | HYBRID)
    ],
)
def test_failed_step_fails_on_all_processes_at_once(
    worlds: Worlds, plan: str, num_ranks: int, executor: str
) -> None:
    worlds(num_ranks, TIMEOUT_SECS).run(skip_the_bad_batch, plan, executor)


def skip_the_bad_batch(rank: int, plan: str, executor: str) -> None:
    """The habit of DDP users: catch the error, go on with the next batch. Then recover, go on."""
    os.environ["RVDCOMM_EXECUTOR"] = executor
    group = dist.new_group()
    parallel = ss.parallelize(
        model(), kwargs=batch(0), plan=plan, options=(PLANS | HYBRID)[plan], group=group
    )
    optimizer = sgd(parallel)
    parallel.step(**batch(0))
    # A call may fail on a rank that is in it still when another one fails in the next call.
    dist.barrier()
    began = time.monotonic()
    errors = [error_of(lambda each=each: parallel.step(**each)) for each in (bad_batch(), batch(2))]
    assert time.monotonic() - began < AT_ONCE_SECS
    assert all(error.startswith(("IndexError", "CommError")) for error in errors)
    assert "failed in an earlier call" in errors[1]
    parallel.recover()
    loss = parallel.step(**batch(3)).item()
    optimizer.step()
    with pytest.warns(UserWarning, match="all ranks skip this batch") as told:
        losses, reasons, state = loop(parallel, [batch(0), bad_batch(), batch(1), batch(2)])
    assert len([one for one in told if "all ranks skip this batch" in str(one.message)]) == 1
    assert [reason.partition(": ")[2] for reason in reasons] == [OUT_OF_RANGE]
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, (loss, losses, reasons, state))
    for each in found:
        torch.testing.assert_close((loss, losses, state), (*each[:2], each[3]), rtol=0, atol=0)
        assert each[2] == reasons
    del os.environ["RVDCOMM_EXECUTOR"]


@on_ranks(2, TIMEOUT_SECS)
def test_group_is_broken_by_abort_until_restart(rank: int) -> None:
    group = dist.new_group()
    x, texts = torch.ones(4), ("R(1)V(2)D(1)", "R(2)V(1)D(1)")
    rv.redistribute(x, *texts, group=group)
    dist.barrier()
    if rank == 0:
        rv.abort(ValueError("no data"), group)
    for _ in range(2):
        error = error_of(lambda: rv.redistribute(x, *texts, group=group))
        assert error.startswith("CommError")
        assert rank or "ValueError: no data" in error
    assert rv.restart(group, text=f"from {rank}") == ["from 0", "from 1"]
    assert torch.equal(rv.redistribute(x, *texts, group=group), 2 * x)
