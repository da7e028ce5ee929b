"""Straight pipelines: worker d holds stage d, and runs warm-up forwards before it alternates.

The warm-up alone tells naive, GPipe and 1F1B apart: it trades memory for idle time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import require_counts
from superscaler_core.schedules.schedule import Schedule


def naive(num_stages: int, num_microbatches: int) -> Schedule:
    """Each microbatch goes forward and backward through all stages before the next one starts.

    One worker per stage. ``(num_stages - 1) / num_stages`` of the makespan is idle for equal
    stages, whatever the number of microbatches; a worker holds one microbatch at a time.

    >>> print(naive(2, 2))
    naive stages=2 microbatches=2
    worker 0: 0F0 0B0 0F1 0B1
    worker 1: 1F0 1B0 1F1 1B1

    Raises:
        ScheduleError: a count is below 1.
    """
    return straight("naive", num_stages, num_microbatches, lambda stage: 0)


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Every worker runs all its forwards, then all its backwards, microbatch 0 first in both.

    One worker per stage. ``(D - 1) / (N + D - 1)`` of the makespan is idle for D equal stages and
    N microbatches; every worker holds N microbatches. Running the backwards from the last
    microbatch to the first would take the same time and memory; in this order weight gradients
    are summed in the same order as in every other schedule.

    >>> print(gpipe(2, 2))
    gpipe stages=2 microbatches=2
    worker 0: 0F0 0F1 0B0 0B1
    worker 1: 1F0 1F1 1B0 1B1

    Raises:
        ScheduleError: a count is below 1.

    Source: Huang et al., GPipe, 2019.
    """
    return straight("gpipe", num_stages, num_microbatches, lambda stage: num_microbatches)


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Worker d runs ``D - 1 - d`` forwards, then alternates forward and backward, then the rest.

    One worker per stage. ``(D - 1) / (N + D - 1)`` of the makespan is idle for D equal stages and
    N microbatches, as in GPipe, but worker d holds only ``min(N, D - d)`` microbatches.
    PipeDream-Flush and DAPPLE use the same rows.

    >>> print(one_f_one_b(2, 3))
    1f1b stages=2 microbatches=3
    worker 0: 0F0 0F1 0B0 0F2 0B1 0B2
    worker 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Raises:
        ScheduleError: a count is below 1.
    """
    return straight("1f1b", num_stages, num_microbatches, lambda stage: num_stages - 1 - stage)


def straight(
    name: str, num_stages: int, num_microbatches: int, num_warmup: Callable[[int], int]
) -> Schedule:
    """A schedule with one worker per stage, from the number of warm-up forwards of each stage.

    Raises:
        ScheduleError: a count is below 1.
    """
    require_counts(name, num_stages=num_stages, num_microbatches=num_microbatches)
    rows = []
    for stage in range(num_stages):
        forwards, backwards = (
            [Action(kind, stage, microbatch) for microbatch in range(num_microbatches)]
            for kind in (ActionKind.FORWARD, ActionKind.BACKWARD)
        )
        rows.append(alternate(forwards, backwards, num_warmup(stage)))
    return Schedule(name, num_stages, num_microbatches, tuple(rows))


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """``num_warmup`` forwards, then forward and backward alternating, then the remaining backwards.

    >>> forwards = [Action.parse(word) for word in ("0F0", "0F1", "0F2")]
    >>> backwards = [Action.parse(word) for word in ("0B0", "0B1", "0B2")]
    >>> " ".join(map(str, alternate(forwards, backwards, 1)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    num_warmup = min(num_warmup, len(forwards))
    num_pairs = len(forwards) - num_warmup
    pairs = zip(forwards[num_warmup:], backwards[:num_pairs], strict=True)
    return (*forwards[:num_warmup], *chain.from_iterable(pairs), *backwards[num_pairs:])
