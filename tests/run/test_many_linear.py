"""The work of the first call of a state dict grows in proportion to its tensors."""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

import rvdcomm as rv
from rvdcomm import Bundle
from rvdcomm.plans import bundle_over
from rvdcomm.run.schedule import Advance, Await, schedule
from rvdcomm.run.stage import _CopyOps, _Memory

KINDS = {
    "rows to columns": ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
    "gather": ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"),
    "sum": ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
}
NEAR = {"messages": (), "one host": ((0, 1, 2, 3),), "two hosts": ((0, 1), (2, 3))}


@pytest.fixture(autouse=True)
def _several_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """Buckets are so small that a few hundred tensors fill some, whose memory is used again."""
    for name in ("bundle.BUCKET_BYTES", "bundle.NEAR_BUCKET_BYTES"):
        monkeypatch.setattr(f"rvdcomm.plans.{name}", 32 << 10)


def bundle_of(num: int, kind: str, near: str) -> Bundle:
    src, dst = (rv.Layout((4, 8), text) for text in KINDS[kind])
    names = [f"experts.{i}.scale" for i in range(num)]
    link = rv.Link(1e-5, 1e9)
    hosts = rv.Topology.hosts([(0, 1), (2, 3)], rv.Link(1e-6, 1e10), link)
    topology = hosts if near == "two hosts" else None
    made = rv.plan_many(
        dict.fromkeys(names, src), dict.fromkeys(names, dst), "float32", topology=topology
    )
    return bundle_over(made, NEAR[near])


def compiled(num: int, kind: str, near: str) -> None:
    """All that rank 0 does in the first call, except for the native core."""
    bundle = bundle_of(num, kind, near)
    for program in bundle.program_of(0):
        domain = next((group for group in program.peer_groups if 0 in group), (0,))
        program.arena(0)
        strides = (None,) * len(program.shard_names(0))
        ops = _CopyOps(_Memory(program, 0, domain, strides, frozenset()))
        for action in schedule(program, 0).actions:
            if hasattr(action, "instruction"):
                ops.add(action)


def num_calls(num: int, kind: str, near: str) -> int:
    """Calls of functions, those of Python and those in C."""
    counts: Counter[str] = Counter()

    def count(_: FrameType, event: str, __: Any) -> None:
        counts[event] += 1

    sys.setprofile(count)
    try:
        compiled(num, kind, near)
    finally:
        sys.setprofile(None)
    return counts["call"] + counts["c_call"]


@pytest.mark.parametrize("near", NEAR)
@pytest.mark.parametrize("kind", ["rows to columns", "sum"])
def test_steps_of_a_first_call_grow_in_proportion_to_the_tensors(kind: str, near: str) -> None:
    # The plan of one tensor is the same work for any number of them.
    for num in (10, 80, 160):
        bundle_of(num, kind, near)
    assert num_calls(160, kind, near) <= 2.15 * num_calls(80, kind, near)


@pytest.mark.parametrize("kind", KINDS)
def test_ranks_wait_for_each_other_by_bucket_and_not_by_tensor(kind: str) -> None:
    bundle = bundle_of(200, kind, "one host")
    (program,), (batch,) = bundle.program_of(0), bundle.batches
    found = schedule(program, 0)
    num_events = sum(isinstance(action, Advance) for action in found.actions)
    num_waits = sum(isinstance(action, Await) for action in found.actions)
    assert len(batch.buckets) > 2
    assert num_events <= 2 + 2 * len(batch.buckets)
    assert num_waits <= 3 * (2 + 2 * len(batch.buckets))
