"""Zero bubble: gradients of weights fill the time in which workers would wait."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from superscaler_core.schedules.phases import Phase, folded
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.split_backward import split_backward
from superscaler_core.schedules.straight import straight


def zero_bubble(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H1: 1F1B with split backwards, in which worker d delays its W's by d microbatches.

    One worker per stage. For D equal stages, N >= D microbatches and times F, I >= W a worker is
    idle for ``(D - 1)(F + I - W)``; under 1F1B it is idle for ``(D - 1)(F + I + W)``. Every worker
    holds up to ``min(N, D)`` microbatches, as many as the first worker under 1F1B. In the cases
    that an exact search has covered, it is proved that no order with that memory is shorter: up to
    D = 4 and N = 8, with N >= D, for six times of F, I and W. With N < D there may be a shorter
    order (tests/superscaler_core/published/test_schedules_fitted.py).

    >>> print(zero_bubble(2, 3))
    zero-bubble stages=2 microbatches=3
    worker 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    worker 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Raises:
        ScheduleError: a count is below 1.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, 2023: the hand-made schedule H1.
    """
    return _ahead("zero-bubble", num_stages, num_microbatches, 1)


def zero_bubble_h2(num_stages: int, num_microbatches: int) -> Schedule:
    """ZB-H2: twice the warm-up of 1F1B and twice the delay of ZB-H1, for twice the memory.

    For D equal stages, N >= 2 D - 1 microbatches and times F, I >= W with F + I >= 2 W, a worker is
    idle for ``(D - 1)(F + I - 2 W)`` between its first and its last action. That is 0 if F = I = W.
    Another ``(D - 1) F`` of the makespan is idle, because workers start one after another. Every
    worker holds up to ``min(N, 2 D - 1)`` microbatches. In small cases it is proved that no order
    with that memory has a shorter makespan.

    Raises:
        ScheduleError: a count is below 1.

    Source: as for ``zero_bubble``: the hand-made schedule H2.
    """
    return _ahead("zero-bubble-h2", num_stages, num_microbatches, 2)


def zero_bubble_v(num_workers: int, num_microbatches: int) -> Schedule:
    """ZB-V: worker d of D holds stages d and 2 D - 1 - d; the pipeline is folded into a V.

    For N >= 2 D - 1 microbatches and times F = I = W no worker waits between its first and its last
    action: ``Timeline.bubble_of_span`` is 0. D - 1 units of the makespan are idle, because workers
    start one after another. A worker holds up to 2 D microbatches of one of its two stages, as
    much as D microbatches of the first stage of 1F1B.

    Raises:
        ScheduleError: a count is below 1.

    Source: Qi et al., Zero Bubble Pipeline Parallelism, ICLR 2024, section on ZB-V; the order of
    its public code.
    """
    return folded(
        "zero-bubble-v",
        num_workers,
        num_microbatches,
        lambda worker: _phases(worker, num_workers, num_microbatches),
    )


def _ahead(name: str, num_stages: int, num_microbatches: int, factor: int) -> Schedule:
    """1F1B whose forwards run ahead and whose W's are late by ``factor`` microbatches per stage."""
    whole = straight(
        name, num_stages, num_microbatches, lambda stage: factor * (num_stages - 1 - stage)
    )
    return replace(split_backward(whole, lambda worker: factor * worker), name=name)


def _phases(worker: int, num: int, num_microbatches: int) -> Iterator[Phase]:
    """The row of one of ``num`` workers under ZB-V."""
    left = num - worker
    yield 2 * left - 1, "F0"
    yield worker, "F1 F0"
    yield left, "F1 I1 W1"
    yield max(num_microbatches, 2 * num - 1) - num, "F0 I0 W0 F1 I1 W1"
    yield worker, "I0 I1"
    yield left, "I0 W0"
    yield num_microbatches, "W1"
    yield num_microbatches, "W0"
