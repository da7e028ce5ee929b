"""Search: an order of actions with a short makespan, for given times, memory limits and routes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import inf
from time import monotonic

from superscaler_core.published.tessel.exact import best_in_list, shortest, starts_of
from superscaler_core.published.tessel.reading import ScheduleRequest
from superscaler_core.published.tessel.repetend import repeated
from superscaler_core.schedules.dataflow import Edges
from superscaler_core.schedules.schedule import Schedule, WorkerRoute
from superscaler_core.schedules.timeline import Durations, Time, timeline

MAX_PERIOD_COUNTS = 200
"""Most entries of a table of counts for the work of one microbatch of every route. Durations are
rounded to a unit with which the table meets this limit. The repetend of eight stages then takes
seconds."""

MAX_COUNTS = 6000
"""Most entries of a table of counts for which the whole step is searched at once; without a
deadline, a quarter of this number."""


def search_schedule(
    routes: Sequence[WorkerRoute],
    durations: Durations,
    num_microbatches: int,
    memory_limit: Time | Sequence[Time] | None = None,
    *,
    activations: Mapping[int, Time] | None = None,
    edges: Edges | None = None,
    budget_secs: float = 60,
) -> Schedule:
    """A schedule with a short makespan, within the memory limit of every worker.

    Three searches are tried: list scheduling by urgency; a repetend with the best way into it and
    out of it, as in Tessel; and, if the step is small enough, integer programming of the whole
    step. The shortest result by ``timeline`` is taken. The last two searches round durations that
    have no large common unit. ``exact_schedule`` rounds nothing, and proves that its result is the
    shortest.

    >>> from superscaler_core.schedules import timeline
    >>> from superscaler_core.published.tessel import both_ways
    >>> timeline(search_schedule(both_ways(4), {"F": 1, "B": 1}, 4)).bubble_of_makespan
    Fraction(1, 5)

    Args:
        routes: for each route the workers of every stage; several workers run it together.
            Microbatch m takes route ``m % len(routes)``. ``straight_routes``, ``looped_routes``,
            ``v_routes`` and ``both_ways`` make the usual ones.
        durations: as in ``timeline``. A stage without a time of B has its backwards split into I
            and W.
        num_microbatches: N.
        memory_limit: most activations of a worker, one number for all workers or one per worker;
            None for no limit. Activations count as in ``Schedule.peak_microbatches``.
        activations: memory of a microbatch's activations on each worker of a stage; 1 if absent.
        edges: the stage graph; a chain of stages if None.
        budget_secs: seconds after which the best schedule so far is taken. If infinite, the work of
            the solver is limited, not its time, so that all processes find the same schedule.

    Raises:
        ScheduleError: routes differ in length, a stage has no worker, or a worker no microbatch;
            a duration is missing; edges form a circle; or the memory limit of a worker is less
            than the activations of a single microbatch there.
    """
    request = ScheduleRequest(
        tuple(routes), durations, num_microbatches, memory_limit, activations, edges
    )  # fmt: skip
    schedules = list(_candidates(request, monotonic() + budget_secs))
    return min(schedules, key=lambda one: timeline(one, durations, request.edges).makespan)


def _candidates(request: ScheduleRequest, deadline: float) -> Iterator[Schedule]:
    problem = request.problem()
    best = best_in_list(problem)
    yield problem.schedule(_NAME, best)
    if problem.makespan(best) == problem.bound:
        return
    rough = request.problem(MAX_PERIOD_COUNTS // len(problem.tasks))
    starts = best if rough.tick == problem.tick else best_in_list(rough)
    # Half of the time is left for the whole step.
    table = repeated(rough, (monotonic() + deadline) / 2)
    if table is not None:
        found = starts_of(table)
        yield rough.schedule(_NAME, found)
        starts = min(starts, found, key=rough.makespan)
    most = MAX_COUNTS // 4 if deadline == inf else MAX_COUNTS
    if len(rough.tasks) * rough.makespan(starts) <= most:
        yield rough.schedule(_NAME, shortest(rough, starts, deadline)[0])


_NAME = "searched"
