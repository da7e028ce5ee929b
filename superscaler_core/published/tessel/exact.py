"""Exact: a schedule of the least makespan, by bisection between a lower and an upper bound."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from time import monotonic

import numpy as np

from superscaler_core.published.tessel.bisection import least
from superscaler_core.published.tessel.counts import Line, OutOfTimeError, Table, find_counts
from superscaler_core.published.tessel.in_list import RULES, in_list
from superscaler_core.published.tessel.problem import Problem, Starts
from superscaler_core.published.tessel.reading import ScheduleRequest
from superscaler_core.schedules.dataflow import Edges
from superscaler_core.schedules.schedule import Schedule, WorkerRoute
from superscaler_core.schedules.timeline import Durations, Time, timeline


def exact_schedule(
    routes: Sequence[WorkerRoute],
    durations: Durations,
    num_microbatches: int,
    memory_limit: Time | Sequence[Time] | None = None,
    *,
    activations: Mapping[int, Time] | None = None,
    edges: Edges | None = None,
    budget_secs: float = 60,
) -> Schedule:
    """A schedule that is proved to have the shortest makespan.

    Its times are those of ``timeline(schedule, durations, edges)``, without communication. For up
    to about 100 actions whose durations are small whole numbers, the search takes seconds.

    >>> from superscaler_core.schedules import timeline
    >>> from superscaler_core.published.tessel import straight_routes
    >>> times = {"F": 1, "I": 1, "W": 1}
    >>> timeline(exact_schedule(straight_routes(4), times, 8, memory_limit=4), times).makespan
    27

    Args:
        routes, durations, num_microbatches, memory_limit, activations, edges, budget_secs: as in
            ``search_schedule``.

    Raises:
        ScheduleError: as in ``search_schedule``.
        OutOfTimeError: a ScheduleError: ``budget_secs`` are over, and nothing is proved yet.
    """
    request = ScheduleRequest(
        tuple(routes), durations, num_microbatches, memory_limit, activations, edges
    )  # fmt: skip
    problem = request.problem()
    starts, is_proved = shortest(problem, best_in_list(problem), monotonic() + budget_secs)
    if not is_proved:
        raise OutOfTimeError(
            f"exact_schedule: {budget_secs} s are over, and it is not proved that makespan "
            f"{problem.makespan(starts) * problem.tick} is the least; no schedule has less than "
            f"{problem.bound * problem.tick}. Give it more time, or use search_schedule."
        )
    return problem.schedule("exact", starts)


def is_shortest(
    schedule: Schedule,
    routes: Sequence[WorkerRoute],
    durations: Durations,
    memory_limit: Time | Sequence[Time] | None = None,
    *,
    activations: Mapping[int, Time] | None = None,
    edges: Edges | None = None,
    budget_secs: float = 60,
) -> bool:
    """Whether no schedule with these routes and memory limits has a shorter makespan.

    A schedule whose makespan is the lower bound of ``Problem.bound`` needs no search. For any other
    schedule, the solver searches for one that is a tick shorter, which takes less time than
    ``exact_schedule``.

    >>> from superscaler_core.schedules import zero_bubble
    >>> from superscaler_core.published.tessel import straight_routes
    >>> times = {"F": 2, "I": 3, "W": 1}
    >>> [is_shortest(zero_bubble(2, 4), straight_routes(2), times, limit) for limit in (2, 3)]
    [True, False]

    Args:
        schedule: any schedule.
        routes, durations, memory_limit, activations, edges, budget_secs: as in
            ``search_schedule``.

    Raises:
        ScheduleError: as in ``search_schedule``.
        OutOfTimeError: a ScheduleError: ``budget_secs`` are over, and nothing is proved yet.
    """
    request = ScheduleRequest(
        tuple(routes), durations, schedule.num_microbatches, memory_limit, activations, edges
    )  # fmt: skip
    problem = request.problem()
    num_ticks = Fraction(timeline(schedule, durations, edges).makespan) / problem.tick
    if num_ticks <= problem.bound:
        return True
    shorter = _within(problem, math.ceil(num_ticks) - 1)
    return find_counts(problem, shorter, monotonic() + budget_secs) is None


def best_in_list(problem: Problem) -> Starts:
    """The shortest of the list schedules that ``RULES`` give."""
    return min((in_list(problem, rule) for rule in RULES), key=problem.makespan)


def shortest(problem: Problem, starts: Starts, deadline: float) -> tuple[Starts, bool]:
    """Starts of the least makespan, and whether it is proved that it is the least.

    In some best schedule, every action starts as early as the order of its workers allows. There
    every start is a sum of durations, so a whole number of ticks.

    Args:
        problem: the tasks.
        starts: the starts of any schedule.
        deadline: by ``time.monotonic``; past it, the best starts so far are returned.
    """

    def solve(num_ticks: int) -> tuple[int, Starts] | None:
        table = find_counts(problem, _within(problem, num_ticks), deadline)
        if table is None:
            return None
        found = starts_of(table)
        return problem.makespan(found), found

    _, found, is_proved = least(problem.bound, problem.makespan(starts), starts, solve)
    return found, is_proved


def _within(problem: Problem, num_ticks: int) -> Line:
    """All actions in ``num_ticks`` ticks, none of them within the head or the tail of its task."""

    def known(number: int, tick: int) -> int | None:
        task = problem.tasks[number]
        if tick < problem.heads[number]:
            return 0
        is_late = tick >= num_ticks - problem.tails[number] - task.ticks
        return task.num if is_late else None

    return Line(num_ticks, known)


def starts_of(table: Table) -> Starts:
    """The starts in a table that counts from 0; a task starts at most one action in a tick."""
    return [np.flatnonzero(np.diff(row, prepend=0)).tolist() for row in table]
