"""Overlap: a value with a text form, and a part of the decisions of a plan."""

from __future__ import annotations

import pytest

import superscaler_core as ss
from superscaler_core.plan.overlap import NO_OVERLAP
from tests.superscaler_core.cases import Case


@pytest.mark.parametrize(
    "text, overlap",
    [
        ("prefetch 0 reductions off moves off duplex off bucket 16777216", NO_OVERLAP),
        ("prefetch 2 reductions on moves off duplex on bucket 4000",
         ss.Overlap(prefetch=2, reductions=True, duplex=True, bucket_bytes=4000)),
        ("prefetch 0 reductions off moves on duplex off pairs on bucket 1",
         ss.Overlap(moves=True, pairs=True, bucket_bytes=1)),
    ],
)  # fmt: skip
def test_older_texts_that_name_all_switches_are_read(text: str, overlap: ss.Overlap) -> None:
    assert ss.Overlap.parse(text) == overlap


@pytest.mark.parametrize(
    "overlap, text",
    [
        (NO_OVERLAP, "none"),
        (ss.Overlap(prefetch=1, reductions=True), "prefetch 1 reductions"),
        (ss.Overlap(moves=True, bucket_bytes=1, memory_bytes=0), "moves bucket 1 memory 0"),
        (ss.Overlap(pairs=True), "pairs"),
        (ss.Overlap(duplex=True), "duplex"),
    ],
)
def test_the_text_names_only_what_is_on(overlap: ss.Overlap, text: str) -> None:
    assert str(overlap) == text
    assert ss.Overlap.parse(text) == overlap
    plan = Case("zero3", 2).compiled().plan
    plan.overlap = overlap
    decisions = plan.decisions
    assert ss.Decisions.parse(str(decisions)) == decisions
    assert plan.copy().overlap == overlap


def test_invalid_overlap_raises_plan_error() -> None:
    with pytest.raises(ss.PlanError, match="prefetch=-1: it is a whole number of at least 0"):
        ss.Overlap(prefetch=-1)
    with pytest.raises(ss.PlanError, match=r"bucket_bytes=0: .* at least 1"):
        ss.Overlap(bucket_bytes=0)
    with pytest.raises(ss.PlanError, match=r"memory_bytes=-1: .* at least 0"):
        ss.Overlap(memory_bytes=-1)
    with pytest.raises(ss.PlanError, match="cannot read the overlap 'prefetch'"):
        ss.Overlap.parse("prefetch")
