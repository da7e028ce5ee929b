"""Words: the sentences about a plan name its ends, every step, and its cost."""

from __future__ import annotations

import pytest

import rvdcomm as rv
from superscaler_core.report import plan_in_words

TRANSITIONS = [
    ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)", "4 partial sums", "4 copies"),
    ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)", "cut in 4 along dim 0", "4 copies"),
    ("R(2)V(1)D(2,1)", "R(1)V(1)D(2,2)", "2 copies, cut in 2 along dim 0", "cut in 2 along dim 1"),
]


@pytest.mark.parametrize(("src", "dst", "first", "then"), TRANSITIONS)
def test_words_name_both_ends_and_every_step(src: str, dst: str, first: str, then: str) -> None:
    ends = (rv.Layout((8, 8), text, range(4)) for text in (src, dst))
    plan = rv.plan(*ends, "float32")
    start, *steps, end, cost = plan_in_words(plan)
    assert first in start
    assert then in end
    assert len(steps) == len(plan.path.steps)
    assert all("rank" in step for step in steps)
    assert "sends" in cost
