"""Fitted: a fast zero-bubble schedule for given times of F, I and W, within a memory limit."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace

from superscaler_core.published.tessel.counts import OutOfTimeError
from superscaler_core.published.tessel.exact import exact_schedule
from superscaler_core.published.tessel.routes import straight_routes
from superscaler_core.published.tessel.search import search_schedule
from superscaler_core.schedules.errors import ScheduleError, require_counts
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.split_backward import split_backward
from superscaler_core.schedules.straight import straight
from superscaler_core.schedules.timeline import EQUAL, Durations, timeline


def zero_bubble_fitted(
    num_stages: int,
    num_microbatches: int,
    durations: Durations = EQUAL,
    limit: int = 0,
    search_secs: float = 0,
) -> Schedule:
    """The fastest of several orders of F, I and W for given times, one worker per stage.

    The candidates are straight pipelines with several warm-ups and delays of W, list schedules by
    urgency, and the result of ``exact_schedule`` if there is time for it. They include 1F1B with
    split backwards, ZB-H1, and ZB-H2 if its memory fits, so the result is never slower than these.
    Without ``search_secs`` the result is a heuristic. In small cases (up to D = 4 and N = 8) with
    N >= D, a limit of D and equal stages, it takes as long as the best order; with other counts it
    takes at most 5 % longer (tests/superscaler_core/published/test_schedules_fitted.py).

    >>> times = {"F": 2, "I": 3, "W": 1}
    >>> print(zero_bubble_fitted(2, 3, times))
    zero-bubble-fitted stages=2 microbatches=3
    worker 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    worker 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Args:
        num_stages: D.
        num_microbatches: N.
        durations: times of F, I and W, of all stages or of each.
        limit: the most microbatches whose activations a worker may hold, at least D; D if 0.
        search_secs: time limit of ``exact_schedule``, in seconds; 0 leaves it out. It takes seconds
            for D <= 4, N <= 8 and times that are small whole numbers.

    Raises:
        ScheduleError: a count is below 1, the limit is below D, or a time is missing.

    Source: the aim is that of the automatic schedules of Qi et al., Zero Bubble Pipeline
    Parallelism, 2023; the candidates are our own.
    """
    name = "zero-bubble-fitted"
    require_counts(name, num_stages=num_stages, num_microbatches=num_microbatches)
    limit = limit or num_stages
    if limit < num_stages:
        raise ScheduleError(
            f"{name} of {num_stages} stages: limit={limit} microbatches; the first worker of a "
            f"pipeline without more bubbles than 1F1B holds {num_stages}."
        )
    halves = {key: secs for key, secs in durations.items() if "B" not in (key, key[0])}
    asked = straight_routes(num_stages), halves, num_microbatches, limit
    every = [*_straights(num_stages, num_microbatches, limit)]
    every += [search_schedule(*asked, budget_secs=0)]
    with suppress(OutOfTimeError):
        every += [exact_schedule(*asked, budget_secs=search_secs)] if search_secs else []
    best = min(every, key=lambda schedule: timeline(schedule, halves).makespan)
    return replace(best, name=name)


def _straights(num_stages: int, num_microbatches: int, limit: int) -> Iterator[Schedule]:
    """Straight pipelines with the warm-up of 1F1B or twice that, and with growing delays of W.

    A warm-up of ``factor (D - 1 - d)`` forwards and a delay of ``factor d`` of worker d are ZB-H1
    (factor 1) and ZB-H2 (factor 2). A worker holds one microbatch more than warm-up plus delay.
    """
    for factor in (1, 2):
        ahead = [min(factor * lag, limit - 1) for lag in reversed(range(num_stages))]
        whole = straight("straight", num_stages, num_microbatches, ahead.__getitem__)
        for most in range(factor * (num_stages - 1) + 1):
            delays = [min(factor * d, most, limit - 1 - ahead[d]) for d in range(num_stages)]
            yield split_backward(whole, delays.__getitem__)
