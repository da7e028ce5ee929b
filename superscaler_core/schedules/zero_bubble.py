"""Zero bubble: 1F1B in which gradients of weights fill the time in which workers would wait."""

from __future__ import annotations

from dataclasses import replace

from superscaler_core.schedules.one_f_one_b import one_f_one_b
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.split_backward import split_backward


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with split backwards, in which worker d delays its W's by d microbatches.

    One worker per stage. For D equal stages, N >= D microbatches and times F, I >= W a worker is
    idle for ``(D - 1)(F + I - W)``; under 1F1B it is idle for ``(D - 1)(F + I + W)``. Every worker
    holds up to ``min(N, D)`` microbatches, as many as the first worker under 1F1B.

    >>> print(zero_bubble(2, 3))
    zero-bubble stages=2 microbatches=3
    worker 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    worker 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Raises:
        ScheduleError: a count is below 1.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023: the hand-made schedule H1.
    """
    straight = one_f_one_b(num_stages, num_microbatches)
    return replace(split_backward(straight, lambda worker: worker), name="zero-bubble")
