"""GPipe: all forwards, then all backwards (Huang et al., 2019)."""

from __future__ import annotations

from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.straight import straight


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
    """
    return straight("gpipe", num_stages, num_microbatches, lambda stage: num_microbatches)
