"""Laws of the search for schedules: memory limits, repeated patterns, and branches."""

from __future__ import annotations

from fractions import Fraction
from time import monotonic

import pytest

from superscaler_core.published.tessel import (
    both_ways,
    exact_schedule,
    search_schedule,
    straight_routes,
    v_routes,
)
from superscaler_core.published.tessel.exact import best_in_list, starts_of
from superscaler_core.published.tessel.reading import ScheduleRequest
from superscaler_core.published.tessel.repetend import find_repetend, repeated
from superscaler_core.schedules import EQUAL, Durations, ScheduleError, Time, WorkerRoute, timeline
from tests.superscaler_core.schedule_rows import TWICE

HALVES: Durations = {"F": 1, "I": 1, "W": 1}


@pytest.mark.parametrize(
    "routes, durations, num_microbatches, limit, makespan",
    [(straight_routes(8), TWICE, 32, range(8, 0, -1), 117), (v_routes(8), HALVES, 16, 16, 103)],
    ids=["1F1B-2", "ZB-V"],
)
def test_eight_workers_reach_the_makespan_of_the_named_schedule(
    routes: tuple[WorkerRoute, ...],
    durations: Durations,
    num_microbatches: int,
    limit: int | range,
    makespan: int,
) -> None:
    found = search_schedule(routes, durations, num_microbatches, limit)
    limits = limit if isinstance(limit, range) else [limit] * 8
    assert all(a <= b for a, b in zip(found.peak_microbatches, limits, strict=True))
    assert timeline(found, durations).makespan == makespan


@pytest.mark.parametrize(
    "routes, durations, limit, period, num_microbatches",
    [
        (straight_routes(3), TWICE, 3, 3, 10),
        (straight_routes(3), TWICE, 1, 9, 9),
        (straight_routes(2), EQUAL, None, 2, 40),
        (straight_routes(2), EQUAL, None, 2, 9),
        (both_ways(2), TWICE, 2, 6, 40),
        (v_routes(2), HALVES, 4, 6, 9),
        (v_routes(2), HALVES, 4, 6, 10),
    ],
)
def test_repetend_has_its_period_and_is_repeated(
    routes: tuple[WorkerRoute, ...],
    durations: Durations,
    limit: int | None,
    period: int,
    num_microbatches: int,
) -> None:
    problem = ScheduleRequest(routes, durations, num_microbatches, limit).problem()
    deadline = monotonic() + 60
    assert find_repetend(problem, deadline).num_ticks == period
    table = repeated(problem, deadline)
    assert table is not None
    found = problem.schedule("repeated", starts_of(table))
    assert limit is None or max(found.peak_microbatches) <= limit
    # The start and the end of the schedule do not depend on the number of microbatches.
    periods = Fraction(num_microbatches, len(routes)) * period
    assert 0 <= timeline(found, durations).makespan - periods <= 2 * period + 2


def test_repetend_of_several_microbatches_is_found_with_little_memory() -> None:
    problem = ScheduleRequest(straight_routes(3), EQUAL, 30, [2, 2, 1]).problem()
    repetend = find_repetend(problem, monotonic() + 60)
    assert Fraction(repetend.num_ticks, repetend.growth) == 3


def test_zero_time_budget_returns_a_list_schedule() -> None:
    request = ScheduleRequest(straight_routes(4), HALVES, 8, 4)
    problem = request.problem()
    found = search_schedule(straight_routes(4), HALVES, 8, 4, budget_secs=0)
    times = timeline(found, HALVES)
    assert times.makespan <= problem.makespan(best_in_list(problem))
    with pytest.raises(ScheduleError, match="it is not proved that makespan"):
        exact_schedule(straight_routes(4), HALVES, 8, 4, budget_secs=0)


def test_search_with_rounded_times_is_within_two_percent_of_the_bound() -> None:
    durations: Durations = {
        (kind, stage): Fraction(time)
        for stage, times in enumerate(((0.011, 0.023), (0.0107, 0.0221), (0.0131, 0.0263)))
        for kind, time in zip("FB", times, strict=True)
    }
    found = search_schedule(straight_routes(3), durations, 6, 3)
    # The lower bound: the work of the last worker, and a forward and a backward of each other one.
    least = 6 * (0.0131 + 0.0263) + 0.011 + 0.0107 + 0.0221 + 0.023
    # Rounding to ticks adds at most 2 %.
    assert least * (1 - 1e-9) <= timeline(found, durations).makespan <= 1.02 * least


def test_memory_limit_counts_the_activation_weight_of_each_stage() -> None:
    weights: dict[int, Time] = {0: Fraction(3, 2), 1: Fraction(1, 2)}
    found = search_schedule(straight_routes(2), TWICE, 4, 3, activations=weights)
    assert found.peak_microbatches[0] <= 2
    with pytest.raises(ScheduleError, match="worker 0, which holds 3/2 of a single microbatch"):
        search_schedule(straight_routes(2), TWICE, 4, 1, activations=weights)


BRANCHES = (((0,), (1,), (2,), (3,)),)
"""An image encoder of two stages, a text encoder, and a decoder that reads both."""
BRANCH_EDGES = ((0, 1), (1, 3), (2, 3))


def test_branches_of_the_stage_graph_run_in_parallel() -> None:
    found = search_schedule(BRANCHES, TWICE, 4, 4, edges=BRANCH_EDGES)
    times = timeline(found, TWICE, BRANCH_EDGES)
    # The makespan is that of a line of three stages. The text encoder adds no time.
    assert times.makespan == 3 * 4 + 3 * 2
    chain = search_schedule(BRANCHES, TWICE, 4, 4)
    assert timeline(chain, TWICE).makespan == 3 * 4 + 3 * 3


@pytest.mark.parametrize(
    "routes, more, match",
    [
        ((((0,), ()),), {}, "names the workers of every stage"),
        ((((0,), (2,)),), {}, "they are numbered from 0"),
        ((((0,), (1,)), ((2,), (3,))), {"num_microbatches": 1}, "have to take every route"),
        (straight_routes(2), {"edges": ((0, 1), (1, 0))}, "read each other in a circle"),
        (straight_routes(2), {"edges": ((0, 2),)}, "edge 0 -> 2"),
        (straight_routes(2), {"memory_limit": [1]}, "1 memory limits of 2 workers"),
        (straight_routes(2), {"durations": {"F": 1}}, "duration of I at stage 0"),
    ],
)
def test_invalid_requests_raise_schedule_error(
    routes: tuple[WorkerRoute, ...], more: dict[str, object], match: str
) -> None:
    arguments = {"durations": TWICE, "num_microbatches": 4} | more
    with pytest.raises(ScheduleError, match=match):
        search_schedule(routes, **arguments)  # type: ignore[arg-type]


def test_one_microbatch_is_enough_for_two_routes_over_the_same_workers() -> None:
    """The microbatch takes one of the two routes, and no worker is left without an action."""
    schedule = search_schedule(both_ways(2), TWICE, 1)
    assert timeline(schedule, TWICE).makespan == 2 * (1 + 2)
