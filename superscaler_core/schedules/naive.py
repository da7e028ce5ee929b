"""Naive model parallelism: one microbatch at a time, all other workers idle."""

from __future__ import annotations

from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.straight import straight


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
