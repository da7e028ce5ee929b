"""Interleaved 1F1B and LoopedBFS: every worker holds several stages, dealt out in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import require_counts
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.straight import alternate, one_f_one_b


def interleaved(num_workers: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """1F1B over v ``chunks`` a worker; worker d of D holds stages d, D + d, 2D + d ...

    Microbatches are grouped in rounds of D: a worker runs a round through its first stage (a
    *chunk* of the model), then through its second, and so on; the backward takes the chunks in the
    opposite order. For N >= D microbatches and v > 1 equal chunks, a worker is idle for
    ``(D - 1)(F + B)`` of one chunk, ``(D - 1) / (v N + D - 1)`` of the makespan. If D divides N,
    worker d holds up to ``min(v N, (v - 1) D + 2 (D - 1 - d) + 1)`` microbatches of a chunk. With
    one chunk it is 1F1B.

    Any N is possible, and with equal chunks no other order is faster. If D does not divide N, there
    are N // D rounds (at least one), whose sizes differ by at most one. So no round is smaller than
    D, unless it is the only one. A short last round would return to worker 0 for the next chunk
    and wait there for backwards that worker 0 runs first.

    Raises:
        ScheduleError: a count is below 1.

    Source: Narayanan et al., Efficient large-scale language model training on GPU clusters, 2021.
    """
    counts = {"num_workers": num_workers, "num_microbatches": num_microbatches, "chunks": chunks}
    require_counts("interleaved", **counts)
    if chunks == 1:
        # There is no second chunk to fill the time until the first backward arrives, so half the
        # warm-up is enough.
        return one_f_one_b(num_workers, num_microbatches)
    rounds = _split(num_microbatches, max(1, num_microbatches // num_workers))
    first = (chunks - 1) * len(rounds[0])
    return _in_rounds(
        "interleaved",
        num_workers,
        chunks,
        rounds,
        lambda worker: first + 2 * (num_workers - 1 - worker),
    )


def looped_bfs(num_workers: int, num_microbatches: int, chunks: int = 1) -> Schedule:
    """GPipe over the stages of interleaved 1F1B: all forwards, chunk by chunk, then all backwards.

    It takes as long as interleaved 1F1B, and a worker holds all ``v N`` microbatches of a chunk. A
    stage runs all its forwards, and all its backwards, in one go. So the weights of a chunk are
    needed only twice a step, which suits plans that gather them, and gradients of a chunk can be
    reduced while other chunks run.

    >>> print(looped_bfs(2, 2, 2))
    looped-bfs stages=4 microbatches=2
    worker 0: 0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1
    worker 1: 1F0 1F1 3F0 3F1 3B0 3B1 1B0 1B1

    Raises:
        ScheduleError: a count is below 1.

    Source: Lamy-Poirier, Breadth-First Pipeline Parallelism, 2022.
    """
    counts = {"num_workers": num_workers, "num_microbatches": num_microbatches, "chunks": chunks}
    require_counts("looped-bfs", **counts)
    return _in_rounds(
        "looped-bfs",
        num_workers,
        chunks,
        [range(num_microbatches)],
        lambda worker: chunks * num_microbatches,
    )


def _in_rounds(
    name: str,
    num_workers: int,
    chunks: int,
    rounds: Sequence[range],
    num_warmup: Callable[[int], int],
) -> Schedule:
    """The schedule in which each round of microbatches passes a worker's chunks one by one."""
    rows = []
    for worker in range(num_workers):
        stages = range(worker, num_workers * chunks, num_workers)
        forwards, backwards = (
            [Action(kind, s, m) for part in rounds for s in order for m in part]
            for kind, order in ((ActionKind.FORWARD, stages), (ActionKind.BACKWARD, stages[::-1]))
        )
        rows.append(alternate(forwards, backwards, num_warmup(worker)))
    return Schedule(name, num_workers * chunks, rounds[-1].stop, tuple(rows))


def _split(num_microbatches: int, num_rounds: int) -> list[range]:
    """Consecutive ranges of nearly equal size, the largest first."""
    size, rest = divmod(num_microbatches, num_rounds)
    starts = [index * size + min(index, rest) for index in range(num_rounds + 1)]
    return [range(*pair) for pair in pairwise(starts)]
