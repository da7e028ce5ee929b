"""Tuning: every way of a system simulated, and the best that fits in memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

from bench.studies.outcome import Outcome, hopeless, outcome_of
from bench.studies.systems import Ladder, System, Way
from bench.studies.workload import Workload

MICROBATCHES = (1, 2, 4, 8, 16)
"""Samples of a microbatch and replica that are tried, ascending."""


def outcomes(workload: Workload, num_gpus: int, system: System) -> Iterator[Outcome]:
    """Every way of a system that may fit, and at last in full what no estimate is faster than."""
    found = []
    for outcome in _estimates(workload, num_gpus, system):
        found.append(outcome)
        yield outcome
    fastest = 0.0
    for outcome in sorted(found, key=lambda o: -o.samples_per_sec):
        if not outcome.is_estimate or outcome.samples_per_sec <= fastest:
            return
        full = outcome_of(workload, num_gpus, system, outcome.way, outcome.microbatch, in_full=True)
        yield full
        fastest = max(fastest, full.samples_per_sec)


def _estimates(workload: Workload, num_gpus: int, system: System) -> Iterator[Outcome]:
    """Every way of a system that may fit."""
    any_fits = False
    for way in sorted(system.ways(num_gpus), key=lambda way: way.is_last_resort):
        if way.is_last_resort and any_fits:
            return
        problem = hopeless(workload, way)
        if problem:
            yield Outcome(system.name, way, problem=problem)
            continue
        found = list(_staircase(workload, num_gpus, system, way))
        yield from found
        any_fits = any_fits or any(not outcome.problem for outcome in found)


def _staircase(workload: Workload, num_gpus: int, system: System, way: Way) -> Iterator[Outcome]:
    """Microbatches of growing size, each with the first ladder's first rung that fits.

    Larger microbatches fit on higher rungs and later ladders, or the same, so what is below is not
    tried again. Who stays where it was and gets no faster goes no further.
    """
    place, rung, before = 0, 0, 0.0
    for samples in MICROBATCHES:
        microbatch = samples * way.dp
        if workload.batch % microbatch:
            return
        start = place, rung
        fitting = None
        while fitting is None:
            rungs = way.ladders[place][rung:]
            tried, fitting = _climb(workload, num_gpus, system, way, rungs, microbatch)
            yield from tried
            if fitting is None:
                place, rung = place + 1, 0
            if place == len(way.ladders):
                return
        rung += fitting
        speed = tried[-1].samples_per_sec
        if (place, rung) == start and speed <= before:
            return
        before = speed


def _climb(
    workload: Workload, num_gpus: int, system: System, way: Way, ladder: Ladder, microbatch: int
) -> tuple[list[Outcome], int | None]:
    """What was tried to find the first rung that fits, that one last; and which, if there is."""
    tried: dict[int, Outcome] = {}

    def has_memory(rung: int) -> bool:
        chosen = way.with_knobs(ladder[rung])
        tried[rung] = outcome_of(workload, num_gpus, system, chosen, microbatch)
        return not tried[rung].lacks_memory

    # Most stay where they are. What cannot be cut so finely is left to lower rungs.
    first = 0 if has_memory(0) else bisect_left(range(len(ladder)), True, lo=1, key=has_memory)
    last = tried.pop(first, None)
    if last is None:
        return list(tried.values()), None
    return [*tried.values(), last], None if last.problem else first


def best(found: list[Outcome]) -> Outcome | None:
    """The fastest that fits, of those that were simulated in full."""
    full = (o for o in found if not o.problem and not o.is_estimate)
    return max(full, key=lambda o: o.samples_per_sec, default=None)
