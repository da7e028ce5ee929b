"""The recurrence of two halves: the published example and general laws."""

from __future__ import annotations

from random import Random

import pytest

from superscaler_core.published.hidup import (
    BACKWARDS,
    Duplexed,
    DuplexStage,
    overlapped_secs,
    serial_secs,
)

THREE = [DuplexStage(c, p, c, 2 * p) for c, p in ((0, 4), (3, 5), (6, 2))]
"""The published example: communication and computing times of three stages."""


@pytest.mark.parametrize(
    ("backward", "overlapped", "serial"),
    # The forward takes 27, and 40 without overlap. A committed backward takes 58 more, without the
    # second half of the last stage, which takes 4 and is omitted in the publication. A woven
    # backward takes 8, then 8 + 10, then 10 + 6, and the same 4.
    [("none", 27, 40), ("committed", 85, 102), ("woven", 69, 102)],
)
def test_three_stages_take_the_published_time(
    backward: str, overlapped: float, serial: float
) -> None:
    last = 0 if backward == "none" else 4
    assert overlapped_secs(THREE, backward, counts_last=False) == overlapped
    assert overlapped_secs(THREE, backward) == overlapped + last
    assert serial_secs(THREE, backward) == serial


def test_committed_backwards_overlap_nothing() -> None:
    forward = overlapped_secs(THREE)
    assert overlapped_secs(THREE, "committed") - forward == sum(2 * sum(s[2:]) for s in THREE)


@pytest.mark.parametrize("backward", BACKWARDS)
def test_overlapped_time_is_at_least_each_part_and_at_most_their_sum(backward: str) -> None:
    random = Random(0)
    for _ in range(200):
        stages = [DuplexStage(*(random.randint(0, 9) for _ in range(4))) for _ in range(5)]
        computing = serial_secs([DuplexStage(0, s[1], 0, s[3]) for s in stages], backward)
        moving = serial_secs([DuplexStage(s[0], 0, s[2], 0) for s in stages], backward)
        found = overlapped_secs(stages, backward)
        assert max(computing, moving) <= found <= computing + moving


@pytest.mark.parametrize("backward", BACKWARDS)
def test_dominated_cost_is_not_faster_after_another_stage(backward: str) -> None:
    random = Random(1)
    for _ in range(200):
        one = Duplexed(*(random.randint(0, 9) for _ in range(3)))
        worse = Duplexed(*(cost + random.randint(0, 2) for cost in one))
        stage = DuplexStage(*(random.randint(0, 9) for _ in range(4)))
        assert one.then(stage, backward).secs() <= worse.then(stage, backward).secs()
