"""Schedules that several tests share, and a short notation for schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

from superscaler_core.schedules import (
    SCHEDULES,
    Action,
    Durations,
    Schedule,
    Time,
    alternate,
    interleaved,
)

TWICE: Durations = {"F": 1, "B": 2}
"""Durations in which a backward takes as long as two forwards."""

STRAIGHT = ("naive", "gpipe", "1f1b")
"""Names of schedules with one stage per worker."""

_SIZES = [(1, 2), (2, 4), (3, 1), (3, 7), (5, 4)]
SMALL = [SCHEDULES[name](d, n) for name in STRAIGHT for d, n in _SIZES]
SMALL += [interleaved(d, n, v) for d, n in _SIZES for v in (2, 3)]


def text_of(*rows: str, stages: int, microbatches: int) -> str:
    """The text of a schedule with the given rows, one per worker."""
    lines = [f"worker {worker}: {row}" for worker, row in enumerate(rows)]
    return "\n".join([f"own stages={stages} microbatches={microbatches}", *lines])


def own(*rows: str, stages: int, microbatches: int) -> Schedule:
    """The schedule with the given rows, one per worker."""
    return Schedule.parse(text_of(*rows, stages=stages, microbatches=microbatches))


def longest_path(schedule: Schedule, secs: Callable[[Action], Time]) -> Time:
    """Makespan of a straight pipeline by recursion, which is another algorithm than timeline's."""
    places = {action: (row, i) for row in schedule.rows for i, action in enumerate(row)}
    named = {str(action): action for action in places}

    @cache
    def end(action: Action) -> Time:
        row, index = places[action]
        stage, m = action.stage, action.microbatch
        names = {"F": [f"{stage - 1}F{m}"], "R": [f"{stage}F{m}"], "W": [f"{stage}I{m}"]}
        back = [f"{stage}{k}{m}" for k in "FR"] + [f"{stage + 1}{k}{m}" for k in "BI"]
        before = [row[index - 1]] if index else []
        before += [named[name] for name in names.get(action.kind, back) if name in named]
        return max(map(end, before), default=0) + secs(action)

    return max(end(row[-1]) for row in schedule.rows)


def round_robin(replicas: Sequence[int], num_microbatches: int) -> Schedule:
    """1F1B with several workers per stage, which take the microbatches in turn.

    The number of warm-up forwards of a worker is the number of workers of all later stages, divided
    by the number of workers of its stage and rounded down. Source: PipeDream's replicated stages,
    with a flush.
    """
    rows = []
    for stage, count in enumerate(replicas):
        for worker in range(count):
            mine = range(worker, num_microbatches, count)
            forwards, backwards = ([Action(kind, stage, m) for m in mine] for kind in "FB")
            rows.append(alternate(forwards, backwards, sum(replicas[stage + 1 :]) // count))
    return Schedule("round-robin", len(replicas), num_microbatches, tuple(rows))
