"""Laws of timelines: start times of actions, published schedules, and deadlocks."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

import superscaler_core as ss
from superscaler_core.schedules import Action, Timeline, gpipe, one_f_one_b, timeline
from superscaler_core.schedules.timeline import Durations, Time
from tests.superscaler_core.schedule_rows import SMALL, longest_path, own


def starts(times: Timeline, *actions: str) -> list[Time]:
    spans = times.spans
    return [spans[Action.parse(action)].start for action in actions]


@given(st.sampled_from(SMALL), st.data())
def test_makespan_of_uneven_stages_is_the_longest_path(
    schedule: ss.Schedule, data: st.DataObject
) -> None:
    times = st.fractions(Fraction(1, 8), 9, max_denominator=8)
    durations: Durations = {
        (kind, stage): data.draw(times) for kind in "FB" for stage in range(schedule.num_stages)
    }
    found = timeline(schedule, durations)
    assert found.makespan == longest_path(schedule, lambda a: durations[a.kind, a.stage])
    assert all(
        busy + idle == found.makespan for busy, idle in zip(found.busy, found.idle, strict=True)
    )


def test_duration_of_a_stage_overrides_that_of_its_kind() -> None:
    times = timeline(gpipe(3, 2), {"F": 1, "B": 2, ("F", 1): 5, ("B", 2): Fraction(1, 2)})
    assert times.busy == (6, 14, 3)
    assert starts(times, "0F1", "1F0", "1F1", "2F0", "2F1") == [1, 1, 6, 6, 11]
    assert starts(times, "2B0", "2B1", "1B0") == [12, Fraction(25, 2), Fraction(25, 2)]


def test_branches_of_the_stage_graph_run_side_by_side() -> None:
    times = timeline(gpipe(4, 1), edges=[(0, 1), (0, 2), (1, 3), (2, 3)])
    assert starts(times, "0F0", "1F0", "2F0", "3F0") == [0, 1, 1, 2]
    assert starts(times, "3B0", "1B0", "2B0", "0B0") == [3, 4, 4, 5]


def test_stage_on_several_workers_waits_for_all_of_them_and_keeps_them_busy() -> None:
    """Stage 2 is split over both workers. Worker 1 starts it late, as stage 1 takes longer."""
    schedule = own("0F0 2F0 2B0 0B0", "1F0 2F0 2B0 1B0", stages=3, microbatches=1)
    times = timeline(schedule, {"F": 1, "B": 1, ("F", 1): 4}, edges=[(0, 2), (1, 2)])
    assert [span.start for span in times.rows[0]] == [0, 4, 5, 6]
    assert [span.start for span in times.rows[1]] == [0, 4, 5, 6]
    assert (times.busy, times.idle) == ((4, 7), (3, 0))


# Published schedules, written as rows


def test_recycling_feeds_the_last_stage_to_the_first() -> None:
    schedule = own("0f0 0f0.1 0F0 0B0", "1f0 1f0.1 1F0 1B0", stages=2, microbatches=1)
    times = timeline(schedule)
    assert starts(times, "0f0", "1f0", "0f0.1", "1f0.1", "0F0", "1F0", "1B0") == [*range(7)]
    assert times.peak_microbatches == (1, 1)


# Deadlock


def deadlock(schedule: ss.Schedule, edges: list[tuple[int, int]] | None = None) -> str:
    with pytest.raises(ss.ScheduleError) as caught:
        timeline(schedule, edges=edges)
    return str(caught.value)


def test_deadlock_error_names_the_cycle_and_the_orders_that_cause_it() -> None:
    """Worker 0 waits for 0B0 before it sends microbatch 1; worker 1 waits for 1 before 1B0."""
    schedule = own("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", stages=2, microbatches=2)
    assert deadlock(schedule) == (
        "schedule own can not run, actions wait for each other: 0B0 for 1B0 (its data), "
        "1B0 for 1F1 (worker 1 runs it first), 1F1 for 0F1 (its data), "
        "0F1 for 0B0 (worker 0 runs it first); turn round one of the orders named."
    )


def test_deadlock_error_names_a_short_cycle_of_a_long_schedule() -> None:
    rows = [list(row) for row in one_f_one_b(4, 64).rows]
    rows[2][5], rows[2][-1] = rows[2][-1], rows[2][5]
    assert deadlock(ss.Schedule("own", 4, 64, tuple(map(tuple, rows)))) == (
        "schedule own can not run, actions wait for each other: 2B63 for 2F63 (its data), "
        "2F63 for 2B63 (worker 2 runs it first); turn round one of the orders named."
    )


def test_opposite_orders_of_two_shared_stages_are_a_deadlock() -> None:
    """Both workers run both stages together, but in opposite orders. Collectives would hang."""
    schedule = own("0F0 1F0 1B0 0B0", "1F0 0F0 1B0 0B0", stages=2, microbatches=1)
    assert deadlock(schedule, edges=[]) == (
        "schedule own can not run, actions wait for each other: 0F0 for 1F0 (worker 1 runs it "
        "first), 1F0 for 0F0 (worker 0 runs it first); turn round one of the orders named."
    )


def test_deadlock_of_a_cyclic_stage_graph_names_its_edges_only() -> None:
    assert deadlock(gpipe(2, 1), edges=[(0, 1), (1, 0)]) == (
        "schedule gpipe can not run, actions wait for each other: 0F0 for 1F0 (its data), "
        "1F0 for 0F0 (its data); leave one of these edges out of the stage graph."
    )
