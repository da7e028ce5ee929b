"""1F1B: run a backward as soon as one is ready (PipeDream-Flush and DAPPLE use the same rows)."""

from __future__ import annotations

from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.straight import straight


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Worker d runs ``D - 1 - d`` forwards, then alternates forward and backward, then the rest.

    One worker per stage. ``(D - 1) / (N + D - 1)`` of the makespan is idle for D equal stages and
    N microbatches, as in GPipe, but worker d holds only ``min(N, D - d)`` microbatches.

    >>> print(one_f_one_b(2, 3))
    1f1b stages=2 microbatches=3
    worker 0: 0F0 0F1 0B0 0F2 0B1 0B2
    worker 1: 1F0 1B0 1F1 1B1 1F2 1B2

    Raises:
        ScheduleError: a count is below 1.
    """
    return straight("1f1b", num_stages, num_microbatches, lambda stage: num_stages - 1 - stage)
