"""Interleaved 1F1B: every worker holds several stages (Narayanan et al., 2021)."""

from __future__ import annotations

from itertools import pairwise

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import require_counts
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.straight import alternate


def interleaved(num_workers: int, num_microbatches: int, num_chunks: int) -> Schedule:
    """1F1B over ``num_workers * num_chunks`` stages; worker d holds stages d, D + d, 2D + d, ...

    Microbatches are grouped in rounds of D: a worker runs a round through its first stage (a
    *chunk* of the model), then through its second, and so on; the backward takes the chunks in the
    opposite order. For N >= D microbatches and v > 1 equal chunks, a worker is idle for
    ``(D - 1)(F + B)`` of one chunk, ``(D - 1) / (v N + D - 1)`` of the makespan. If D divides N,
    worker d holds up to ``min(v N, (v - 1) D + 2 (D - 1 - d) + 1)`` microbatches of a chunk.

    Any N is possible, and with equal chunks no other order is faster. If D does not divide N, there
    are N // D rounds (at least one), whose sizes differ by at most one. So no round is smaller than
    D, unless it is the only one. A short last round would return to worker 0 for the next chunk
    and wait there for backwards that worker 0 runs first.

    Args:
        num_workers: D, at least 1.
        num_microbatches: N, at least 1.
        num_chunks: v, stages per worker; with v = 1 the schedule is 1F1B.

    Raises:
        ScheduleError: a count is below 1.
    """
    require_counts(
        "interleaved",
        num_workers=num_workers,
        num_microbatches=num_microbatches,
        num_chunks=num_chunks,
    )
    num_rounds = max(1, num_microbatches // num_workers)
    rounds = _split(num_microbatches, num_rounds)
    # With one chunk there is no second chunk to fill the time until the first backward arrives,
    # so half the warm-up is enough.
    lead = 2 if num_chunks > 1 else 1
    rows = []
    for worker in range(num_workers):
        stages = range(worker, num_workers * num_chunks, num_workers)
        forwards = [
            Action(ActionKind.FORWARD, s, m) for part in rounds for s in stages for m in part
        ]
        backwards = [
            Action(ActionKind.BACKWARD, s, m)
            for part in rounds
            for s in reversed(stages)
            for m in part
        ]
        num_warmup = (num_chunks - 1) * len(rounds[0]) + lead * (num_workers - 1 - worker)
        rows.append(alternate(forwards, backwards, num_warmup))
    return Schedule("interleaved", num_workers * num_chunks, num_microbatches, tuple(rows))


def _split(num_microbatches: int, num_rounds: int) -> list[range]:
    """Consecutive ranges of nearly equal size, the largest first."""
    size, rest = divmod(num_microbatches, num_rounds)
    starts = [index * size + min(index, rest) for index in range(num_rounds + 1)]
    return [range(*pair) for pair in pairwise(starts)]
