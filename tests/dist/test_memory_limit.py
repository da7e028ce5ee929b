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


SOURCES = [*all_layouts(SHAPE[1:], 4), *all_layouts(SHAPE[1:], 8)[::5]]


def assert_peaks(rank: int, plans: list[rv.Plan]) -> None:
    """This rank holds what was planned, and no more than the limits."""
    for plan in plans:
        call = rv.Redistributor(plan)
        call(shard_of(rank, plan.src))
        what = f"{plan.src.rvd} -> {plan.dst.rvd} under {plan.memory_limit}"
        assert call.plan is plan, what
        assert call.peak_bytes == plan.program.peak_bytes(rank), what
        assert call.peak_bytes <= min(plan.memory_limit, plan.cost.peak_bytes), what


@pytest.mark.parametrize("src", SOURCES, ids=lambda layout: str(layout.rvd))
def test_peak_bytes_of_processes_equal_those_of_the_plan(worlds: Worlds, src: rv.Layout) -> None:
    num_ranks = len(src.ranks)
    plans = [
        rv.plan(src, dst, memory_limit=limit)
        for dst in all_layouts(src.shape, num_ranks)[:: num_ranks // 4]
        for limit in limits_of(src, dst)
    ]
    worlds(num_ranks).run(assert_peaks, plans)


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
