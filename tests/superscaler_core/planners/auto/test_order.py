"""Laws of orders: the counts in the papers of the schedules, in microbatches of one stage."""

from __future__ import annotations

import pytest

from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.order import ROUNDS, Order, orders_of
from superscaler_core.schedules import ScheduleError

NUM = 64
"""Number of microbatches of a step."""


def order_of(setting: Setting, microbatches: int) -> Order:
    return orders_of(setting, microbatches)[0]


def most(order: Order) -> int:
    """The most microbatches of one stage that a worker holds."""
    return max(sum(moment) for held in order.held for moment in held)


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_schedules_hold_the_published_number_of_microbatches(pp: int) -> None:
    def order(schedule: str, chunks: int = 1) -> Order:
        return order_of(Setting(pp=pp, schedule=schedule, chunks=chunks), NUM)

    assert order("interleaved").held == tuple({(num,)} for num in range(pp, 0, -1))
    # (v - 1) D + 2 (D - 1) + 1 microbatches of one of v D chunks.
    assert most(order("interleaved", 4)) == 3 * pp + 2 * (pp - 1) + 1
    assert most(order("zero-bubble")) == pp
    assert most(order("zero-bubble-h2")) == 2 * pp - 1
    assert most(order("zero-bubble-v")) == 2 * pp
    assert order("zero-bubble").is_split
    assert not order("interleaved").is_split


def test_every_stage_of_chimera_has_two_copies() -> None:
    order = order_of(Setting(pp=4, schedule="chimera"), NUM)
    assert order.copies == 2
    assert order.stages[0] == (0, 3)


def test_few_microbatches_limit_the_number_that_is_held() -> None:
    assert most(order_of(Setting(pp=8, schedule="zero-bubble-h2"), 8)) == 8


def test_worker_with_the_first_and_the_last_stage_holds_most_of_the_first() -> None:
    order = order_of(Setting(pp=4, schedule="dualpipe-v"), NUM)
    assert order.stages[0] == (0, 7)
    assert all(first > last for first, last in order.held[0])


def test_impossible_schedule_raises_its_error() -> None:
    with pytest.raises(ScheduleError, match="chimera"):
        order_of(Setting(pp=3, schedule="chimera"), NUM)


def test_long_step_has_two_orders_that_differ_by_a_period() -> None:
    first, second = orders_of(Setting(pp=4), NUM)
    assert (first.schedule.num_microbatches, second.schedule.num_microbatches) == (
        ROUNDS * 4,
        ROUNDS * 4 - 4,
    )
    assert len(orders_of(Setting(pp=4), ROUNDS * 4)) == 1
