"""Laws of orders: the counts in the papers of the schedules, in microbatches of one stage."""

from __future__ import annotations

import pytest

from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.order import Order, order_of
from superscaler_core.schedules import ScheduleError

NUM = 64
"""Number of microbatches of a step."""


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_schedules_hold_the_published_number_of_microbatches(pp: int) -> None:
    def order(schedule: str, chunks: int = 1) -> Order:
        return order_of(Setting(pp=pp, schedule=schedule, chunks=chunks), NUM)

    assert order("interleaved").held == tuple(range(pp, 0, -1))
    # (v - 1) D + 2 (D - 1) + 1 microbatches of one of v D chunks.
    assert max(order("interleaved", 4).held) == 3 * pp + 2 * (pp - 1) + 1
    assert max(order("zero-bubble").held) == pp
    assert max(order("zero-bubble-h2").held) == 2 * pp - 1
    assert max(order("zero-bubble-v").held) == 2 * pp
    assert order("zero-bubble").is_split
    assert not order("interleaved").is_split


def test_every_stage_of_chimera_has_two_copies() -> None:
    order = order_of(Setting(pp=4, schedule="chimera"), NUM)
    assert order.copies == 2
    assert order.stages[0] == (0, 3)


def test_few_microbatches_limit_the_number_that_is_held() -> None:
    assert max(order_of(Setting(pp=8, schedule="zero-bubble-h2"), 8).held) == 8


def test_impossible_schedule_raises_its_error() -> None:
    with pytest.raises(ScheduleError, match="chimera"):
        order_of(Setting(pp=3, schedule="chimera"), NUM)
