"""Overlap: a value with a text form, and a part of the decisions of a plan."""

from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.errors import PlanError
from superscaler_core.plan.overlap import NO_OVERLAP
from tests.superscaler_core.training import Case

OVERLAPS = [
    NO_OVERLAP,
    ss.Overlap(prefetch=1),
    ss.Overlap(reductions=True),
    ss.Overlap(moves=True),
    ss.Overlap(duplex=True),
    ss.Overlap(pairs=True),
    ss.Overlap(prefetch=3, reductions=True, bucket_bytes=1),
]


@pytest.mark.parametrize("overlap", OVERLAPS, ids=str)
def test_overlap_round_trips_through_text_and_decisions(overlap: ss.Overlap) -> None:
    assert ss.Overlap.parse(str(overlap)) == overlap
    plan = Case("zero3", 2).compiled().plan
    plan.overlap = overlap
    decisions = plan.decisions
    assert ss.Decisions.parse(str(decisions)) == decisions
    assert plan.copy().overlap == overlap


def test_invalid_overlap_raises_plan_error() -> None:
    with pytest.raises(PlanError, match="prefetch=-1 is at least 0"):
        ss.Overlap(prefetch=-1)
    with pytest.raises(PlanError, match="bucket_bytes=0 at least 1"):
        ss.Overlap(bucket_bytes=0)
    with pytest.raises(PlanError, match="cannot read the overlap 'prefetch'"):
        ss.Overlap.parse("prefetch")
