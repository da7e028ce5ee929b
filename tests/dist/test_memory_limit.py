"""Laws of memory limits: real processes hold what was planned, and no more than the limit."""

from __future__ import annotations

import re

import pytest

import rvdcomm as rv
from rvdcomm.errors import MemoryLimitError
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import shard_of
from tests.dist.world import Worlds
from tests.oracle import all_layouts

pytestmark = pytest.mark.dist

SHAPE = (16, 24)


def limits_of(src: rv.Layout, dst: rv.Layout) -> list[int]:
    """The least limit that a plan fits, what the unlimited plan needs, and halfway."""
    most, least = (getattr(rv.plan(src, dst), name).peak_bytes for name in ("cost", "bound"))
    try:
        rv.plan(src, dst, memory_limit=least)
    except MemoryLimitError as error:
        found = re.search("the least that a plan needs is ([0-9]+)", str(error))
        assert found is not None
        least = int(found[1])
    return sorted({least, (least + most) // 2, most})


def peaks(rank: int, plans: list[rv.Plan]) -> list[str]:
    """What is wrong on this rank with plans under limits."""
    wrong = []
    for plan in plans:
        limit = plan.memory_limit
        assert limit is not None
        what = f"{plan.src.rvd} -> {plan.dst.rvd} under {limit}"
        call = rv.Redistributor(plan)
        call(shard_of(rank, plan.src))
        if call.plan is not plan:
            wrong.append(f"{what}: another plan runs")
        if call.peak_bytes != plan.program.peak_bytes(rank):
            wrong.append(f"{what}: {call.peak_bytes}, planned {plan.program.peak_bytes(rank)}")
        if call.peak_bytes > min(limit, plan.cost.peak_bytes):
            wrong.append(f"{what}: {call.peak_bytes}, the plan says {plan.cost.peak_bytes}")
    return wrong


SOURCES = [
    pytest.param(layout, id=f"{layout.rvd}")
    for layout in [*all_layouts(SHAPE[1:], 4), *all_layouts(SHAPE[1:], 8)[::5]]
]


@pytest.mark.parametrize("src", SOURCES)
def test_peak_bytes_of_processes_equal_those_of_the_plan(worlds: Worlds, src: rv.Layout) -> None:
    num_ranks = len(src.ranks)
    plans = [
        rv.plan(src, dst, memory_limit=limit)
        for dst in all_layouts(src.shape, num_ranks)[:: num_ranks // 4]
        for limit in limits_of(src, dst)
    ]
    assert worlds(num_ranks).run(peaks, plans) == [[]] * num_ranks


@on_ranks(4)
def test_redistribute_and_its_gradient_work_under_a_memory_limit(rank: int) -> None:
    src, dst = rv.Layout(SHAPE, "R(1)V(1)D(4,1)"), rv.Layout(SHAPE, "R(4)V(1)D(1,1)")
    back = rv.Layout(SHAPE, "R(1)V(4)D(1,1)"), src
    limit = max(rv.plan(*pair).cost.peak_bytes for pair in ((src, dst), back))
    result = rv.redistribute(shard_of(rank, src).requires_grad_(), src, dst, memory_limit=limit)
    result.sum().backward()
    assert_moved(result, src, dst)
    with pytest.raises(
        MemoryLimitError, match="memory_limit=1000 bytes a rank, but the least that"
    ):
        rv.redistribute(shard_of(rank, src), src, dst, memory_limit=1000)
