"""Laws of grids: timelines as text."""

from __future__ import annotations

from fractions import Fraction

import pytest

import superscaler_core as ss
from superscaler_core.schedules import gpipe, grid, interleaved, one_f_one_b, timeline
from tests.superscaler_core.schedule_rows import TWICE


def test_grid_of_1f1b() -> None:
    assert grid(one_f_one_b(3, 3)).splitlines() == [
        "1f1b: makespan 10, idle 2/5 of it, peak microbatches 3 2 1",
        "time      0  1  2  3  4  5  6  7  8  9",
        "worker 0 F0 F1 F2 -- -- B0 -- B1 -- B2",
        "worker 1 -- F0 F1 -- B0 F2 B1 -- B2 --",
        "worker 2 -- -- F0 B0 F1 B1 F2 B2 -- --",
    ]


def test_grid_names_stages_of_a_worker_with_several_and_marks_continuation() -> None:
    assert grid(timeline(interleaved(2, 2, 2), TWICE)).splitlines()[1:] == [
        "time       0   1   2   3   4   5   6   7   8   9  10  11  12  13  14",
        "worker 0 0F0 0F1 2F0 2F1  --  -- 2B0  ..  -- 2B1  .. 0B0  .. 0B1  ..",
        "worker 1  -- 1F0 1F1 3F0 3B0  .. 3F1 3B1  .. 1B0  .. 1B1  ..  --  --",
    ]


def test_column_of_the_grid_is_the_greatest_common_duration() -> None:
    times = timeline(gpipe(1, 1), {"F": Fraction(1, 2), "B": Fraction(3, 4)})
    assert grid(times).splitlines() == [
        "gpipe: makespan 5/4, idle 0 of it, peak microbatches 1; a column is 1/4",
        "time      0  1  2  3  4",
        "worker 0 F0 .. B0 .. ..",
    ]


def test_coarse_column_of_the_grid_shows_the_action_at_its_middle() -> None:
    times = timeline(gpipe(1, 2), {"F": 1, "B": 40})
    assert grid(times, unit=10).splitlines()[2] == "worker 0 B0 .. .. .. B1 .. .. .. --"


def test_grid_of_times_without_a_common_unit_has_2000_columns() -> None:
    times = timeline(gpipe(1, 1), {"F": 1_000_003, "B": 1_000_033})
    assert grid(times, width=10**6).splitlines()[2].count("..") == 2000 - 2


@pytest.mark.parametrize("width", [100, 60, 15])
@pytest.mark.parametrize(
    "schedule", [one_f_one_b(8, 32), interleaved(4, 12, 3)], ids=lambda s: s.name
)
def test_grid_fits_its_width_and_shows_every_action_of_worker_0_once(
    schedule: ss.Schedule, width: int
) -> None:
    lines = grid(schedule, width=width).splitlines()
    assert max(map(len, lines)) <= width
    cells = [cell for line in lines for cell in line.split()[2:] if line.startswith("worker 0 ")]
    several = len(schedule.stages_of(0)) > 1
    assert [cell for cell in cells if cell != "--"] == [
        str(action) if several else action.brief for action in schedule.rows[0]
    ]


@pytest.mark.parametrize("unit", [0, -1])
def test_nonpositive_time_of_a_grid_column_is_rejected(unit: int) -> None:
    with pytest.raises(ss.ScheduleError, match="a column of the grid takes a time above 0"):
        grid(timeline(gpipe(1, 1)), unit=unit)
