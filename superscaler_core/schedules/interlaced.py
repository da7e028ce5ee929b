"""Interlaced pipeline: embeddings run on all workers, around what the stages of layers do.

A large embedding is cheap to compute and large to store. On one worker it takes the room of many
layers; cut among all, it takes a share of each. Stages are numbered in the model's order, every
embedding before its stages of layers. An encoder and a decoder on four workers are

    stage     0            1 2       3            4 5
    is        embedding    layers    embedding    layers
    worker    0 1 2 3      0 1       0 1 2 3      2 3
"""

from __future__ import annotations

from itertools import pairwise

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError, require_counts
from superscaler_core.schedules.schedule import Schedule


def interlaced(
    num_workers: int, num_microbatches: int, num_embeddings: int = 2, slack: int = 0
) -> Schedule:
    """1F1B of the layers, in steps of a forward and a backward, and the embeddings around steps.

    In a step a worker of even number runs a forward and then a backward, one of odd number a
    backward and then a forward: so a pair of them passes on two microbatches, one each way. An
    embedding runs forward at the start of the step in which the layers behind it do, and backward
    at the end of the step in which they do; there all workers wait for each other.

    For S workers and N microbatches there are N + S - 1 steps. What a worker does with its layers
    is what it does in 1F1B, in that order, so it holds min(N, S - d) microbatches of them. If a
    backward takes two forwards, a step takes four and not three: either half of it has forwards
    beside backwards, and lasts as long as these.

    With ``slack`` the embeddings run ahead of the layers, and behind them on the way back, so that
    no worker waits at a step's border for what another has just made.

    Args:
        num_workers: S, each with one stage of layers.
        num_microbatches: N.
        num_embeddings: each is in front of S / ``num_embeddings`` stages of layers.
        slack: steps by which embeddings run forward earlier, and backward later.

    Raises:
        ScheduleError: a count is below 1, or ``num_embeddings`` does not divide S.

    Source: the interlaced pipeline of SuperScaler's public code, for two embeddings and S >= 4. If
    S / 2 is odd, the rule there has the second embedding's backward a step before that of the
    layers behind it, which cannot be; here it is in that step, and all S that divide run.
    """
    require_counts("interlaced", num_microbatches=num_microbatches)
    if slack < 0:
        raise ScheduleError(f"interlaced: slack is a number of steps, at least 0, got {slack}.")
    segments = _segments(num_workers, num_embeddings)
    layers = [stage for segment in segments for stage in segment[1:]]
    # An embedding keeps time with the worker of the layers behind it.
    embeddings = [(segment[0], layers.index(segment[1])) for segment in segments]
    rows: list[list[Action]] = [[] for _ in layers]
    for step in range(-slack, num_microbatches + num_workers - 1 + slack):
        before = [
            (ActionKind.FORWARD, stage, _forward(step + slack, worker))
            for stage, worker in embeddings
        ]
        after = [
            (ActionKind.BACKWARD, stage, _backward(step - slack, worker, num_workers))
            for stage, worker in reversed(embeddings)
        ]
        for worker, (row, stage) in enumerate(zip(rows, layers, strict=True)):
            pair = [
                (ActionKind.FORWARD, stage, _forward(step, worker)),
                (ActionKind.BACKWARD, stage, _backward(step, worker, num_workers)),
            ]
            turns = (*before, *(reversed(pair) if worker % 2 else pair), *after)
            row += [Action(*turn) for turn in turns if 0 <= turn[2] < num_microbatches]
    num_stages = num_workers + num_embeddings
    return Schedule("interlaced", num_stages, num_microbatches, tuple(map(tuple, rows)))


def interlaced_edges(num_workers: int, num_embeddings: int = 2) -> tuple[tuple[int, int], ...]:
    """Which stage reads which: an embedding none, and a decoder's layers the encoder's result.

    >>> interlaced_edges(4)
    ((0, 1), (1, 2), (2, 4), (2, 5), (3, 4), (4, 5))

    Raises:
        ScheduleError: as of ``interlaced``.
    """
    segments = _segments(num_workers, num_embeddings)
    chains = [edge for segment in segments for edge in pairwise(segment)]
    crossing = [(a[-1], reader) for a, b in pairwise(segments) for reader in b[1:]]
    return tuple(sorted([*chains, *crossing]))


def _forward(step: int, worker: int) -> int:
    """The microbatch that a worker runs forward in a step, if there is such a one."""
    return step - worker // 2


def _backward(step: int, worker: int, num_workers: int) -> int:
    """The microbatch that a worker runs backward in a step, if there is such a one."""
    return step - (num_workers - 1 - worker // 2)


def _segments(num_workers: int, num_embeddings: int) -> list[range]:
    """The stages from every embedding up to the next one."""
    require_counts("interlaced", num_workers=num_workers, num_embeddings=num_embeddings)
    if num_workers % num_embeddings:
        raise ScheduleError(
            f"interlaced: each of {num_embeddings} embeddings is in front of as many of the "
            f"{num_workers} workers' layers; use a multiple of {num_embeddings} workers."
        )
    size = num_workers // num_embeddings + 1
    return [range(i * size, (i + 1) * size) for i in range(num_embeddings)]
