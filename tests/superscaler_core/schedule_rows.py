"""Schedules that the tests of schedules share, and a short way to write one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

from superscaler_core.schedules import SCHEDULES, Action, Schedule, interleaved
from superscaler_core.schedules.straight import alternate
from superscaler_core.schedules.timeline import Durations

TWICE: Durations = {"F": 1, "B": 2}
"""A backward takes as long as two forwards."""

STRAIGHT = ("naive", "gpipe", "1f1b")
"""Generators of one stage a worker."""

_SIZES = [*product((1, 2, 3, 5), (1, 2, 4, 7))]
SMALL = [SCHEDULES[name](d, n) for name in STRAIGHT for d, n in _SIZES]
SMALL += [interleaved(d, n, v) for d, n in _SIZES for v in (1, 2, 3)]


def text_of(*rows: str, stages: int, microbatches: int) -> str:
    """Text of a schedule with these rows."""
    lines = [f"worker {worker}: {row}" for worker, row in enumerate(rows)]
    return "\n".join([f"own stages={stages} microbatches={microbatches}", *lines])


def own(*rows: str, stages: int, microbatches: int) -> Schedule:
    """Schedule with these rows."""
    return Schedule.parse(text_of(*rows, stages=stages, microbatches=microbatches))


def round_robin(replicas: Sequence[int], num_microbatches: int) -> Schedule:
    """1F1B of stages on several workers each, which take microbatches in turn.

    Source: PipeDream's replicated stages, with a flush; a worker's warm-up is the number of workers
    behind its stage over those of the stage.
    """
    rows = []
    for stage, count in enumerate(replicas):
        for worker in range(count):
            mine = range(worker, num_microbatches, count)
            forwards, backwards = ([Action(kind, stage, m) for m in mine] for kind in "FB")
            rows.append(alternate(forwards, backwards, sum(replicas[stage + 1 :]) // count))
    return Schedule("round-robin", len(replicas), num_microbatches, tuple(rows))
