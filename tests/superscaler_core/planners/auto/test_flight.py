"""Laws of memory in flight: the counts in the papers of the schedules, in shares of a model."""

from __future__ import annotations

import pytest

from superscaler_core.planners.auto import Setting
from superscaler_core.planners.auto.flight import Flight, flight_of

NUM = 64
"""Number of microbatches of a step."""


@pytest.mark.parametrize("pp", [2, 4, 8])
def test_schedules_hold_the_published_number_of_microbatches(pp: int) -> None:
    def held(schedule: str, chunks: int = 1) -> Flight:
        return flight_of(Setting(pp=pp, schedule=schedule, chunks=chunks), NUM)

    assert held("interleaved") == Flight()
    # (v - 1) D + 2 (D - 1) + 1 microbatches, each of one of v D chunks.
    assert held("interleaved", 4).microbatches == (3 * pp + 2 * (pp - 1) + 1) / (4 * pp)
    assert held("zero-bubble") == Flight(1.0, is_split=True)
    assert held("zero-bubble-h2") == Flight((2 * pp - 1) / pp, is_split=True)
    assert held("zero-bubble-v") == Flight(1.0, is_split=True)
    assert held("chimera").copies == 2


def test_few_microbatches_limit_the_number_in_flight() -> None:
    assert flight_of(Setting(pp=8, schedule="zero-bubble-h2"), 8).microbatches == 1.0


@pytest.mark.parametrize(
    "setting", [Setting(), Setting("interlaced", pp=4), Setting(pp=3, schedule="chimera")]
)
def test_setting_without_a_possible_schedule_holds_one_microbatch(setting: Setting) -> None:
    # Chimera needs an even number of workers, so there is no plan with three.
    assert flight_of(setting, 3) == Flight()
