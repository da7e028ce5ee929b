"""ZB-V: a zero bubble with the memory of 1F1B, on a pipeline folded into a V (Qi et al., 2024)."""

from __future__ import annotations

from collections.abc import Iterator

from superscaler_core.schedules.phases import Phase, folded
from superscaler_core.schedules.schedule import Schedule


def zero_bubble_v(num_workers: int, num_microbatches: int) -> Schedule:
    """Worker d holds stages d and 2 D - 1 - d, so that a microbatch turns where it arrived.

    For N >= 2 D - 1 microbatches and times F = I = W no worker waits between its first and its last
    action: ``Timeline.bubble_of_span`` is 0. D - 1 units of the makespan are idle, because workers
    start one after another. A worker holds up to 2 D microbatches of one of its two stages, as
    much as D microbatches of the first stage of 1F1B.

    Args:
        num_workers: D, at least 1.
        num_microbatches: N, at least 1.

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


def _phases(worker: int, num: int, num_microbatches: int) -> Iterator[Phase]:
    """The row of one of ``num`` workers."""
    left = num - worker
    yield 2 * left - 1, "F0"
    yield worker, "F1 F0"
    yield left, "F1 I1 W1"
    yield max(num_microbatches, 2 * num - 1) - num, "F0 I0 W0 F1 I1 W1"
    yield worker, "I0 I1"
    yield left, "I0 W0"
    yield num_microbatches, "W1"
    yield num_microbatches, "W0"
