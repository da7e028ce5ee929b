"""Schedules that several tests share, and a short notation for schedules."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.schedules import SCHEDULES, Action, Schedule, interleaved
from superscaler_core.schedules.straight import alternate
from superscaler_core.schedules.timeline import Durations

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
