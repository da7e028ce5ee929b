"""Interlaced pipeline: all workers run the embeddings, between the stages of layers.

A large embedding is cheap to compute and large to store. On one worker it would take the memory of
many layers; here it is cut over all workers. Stages are numbered in the model's order, every
embedding before its stages of layers. The stages of an encoder and a decoder on four workers are:

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
    num_workers: int,
    num_microbatches: int,
    num_embeddings: int = 2,
    slack: int = 0,
    *,
    apart: bool = False,
) -> Schedule:
    """1F1B of the layers, in steps of a forward and a backward, with the embeddings between steps.

    In a step a worker with an even number runs a forward and then a backward; one with an odd
    number runs a backward and then a forward. So two neighbours exchange two microbatches per step,
    one each way. An embedding runs forward at the start of the step in which its first layers run
    the microbatch forward, and backward at the end of the step in which they run it backward. All
    workers synchronize there.

    S workers and N microbatches take N + S - 1 steps. The layers of a worker run as in 1F1B and in
    the same order, so it holds min(N, S - d) microbatches of them. If a backward takes as long as
    two forwards, a step takes four instead of three units, because each half of a step pairs
    forwards with backwards and lasts as long as the backwards.

    With ``slack`` the embeddings run ahead of the layers in the forward, and behind them in the
    backward, so that no worker waits at the border of a step for a value that was just computed.

    Args:
        num_workers: S; each has one stage of layers.
        num_microbatches: N.
        num_embeddings: each precedes S / ``num_embeddings`` stages of layers.
        slack: number of steps by which embeddings run forward earlier, and backward later.
        apart: put an R right after every F of the layers. It recomputes for the B in the other half
            of the step, or in the first half of the next step. If a recompute takes as long as a
            forward and a backward as long as two forwards, each half of a step is full: a step
            takes four units instead of the six units of recomputing inside the backward.

    Raises:
        ScheduleError: a count is below 1, or ``num_embeddings`` does not divide S.

    Source: the interlaced pipeline of SuperScaler's public code, for two embeddings and S >= 4. If
    S / 2 is odd, the rule there puts the second embedding's backward a step before the backward
    of its layers, which is impossible; here it is in the same step, and every S that
    ``num_embeddings`` divides can run.
    """
    require_counts("interlaced", num_microbatches=num_microbatches)
    if slack < 0:
        raise ScheduleError(f"interlaced: slack is a number of steps, at least 0, got {slack}.")
    segments = _segments(num_workers, num_embeddings)
    layers = [stage for segment in segments for stage in segment[1:]]
    # An embedding runs in time with the worker of its first layers.
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
            forward = [(ActionKind.FORWARD, stage, _forward(step, worker))]
            backward = [(ActionKind.BACKWARD, stage, _backward(step, worker, num_workers))]
            if apart:
                again = _backward(step + worker % 2, worker, num_workers)
                forward.append((ActionKind.RECOMPUTE, stage, again))
            halves = (backward, forward) if worker % 2 else (forward, backward)
            turns = (*before, *halves[0], *halves[1], *after)
            row += [Action(*turn) for turn in turns if 0 <= turn[2] < num_microbatches]
    num_stages = num_workers + num_embeddings
    return Schedule("interlaced", num_stages, num_microbatches, tuple(map(tuple, rows)))


def interlaced_edges(num_workers: int, num_embeddings: int = 2) -> tuple[tuple[int, int], ...]:
    """The stage graph: an embedding reads no stage; a decoder's layers read the encoder's result.

    >>> interlaced_edges(4)
    ((0, 1), (1, 2), (2, 4), (2, 5), (3, 4), (4, 5))

    Raises:
        ScheduleError: as for ``interlaced``.
    """
    segments = _segments(num_workers, num_embeddings)
    chains = [edge for segment in segments for edge in pairwise(segment)]
    crossing = [(a[-1], reader) for a, b in pairwise(segments) for reader in b[1:]]
    return tuple(sorted([*chains, *crossing]))


def _forward(step: int, worker: int) -> int:
    """The microbatch that a worker runs forward in a step; out of range if there is none."""
    return step - worker // 2


def _backward(step: int, worker: int, num_workers: int) -> int:
    """The microbatch that a worker runs backward in a step; out of range if there is none."""
    return step - (num_workers - 1 - worker // 2)


def _segments(num_workers: int, num_embeddings: int) -> list[range]:
    """For each embedding, its stages: itself and the layers up to the next embedding."""
    require_counts("interlaced", num_workers=num_workers, num_embeddings=num_embeddings)
    if num_workers % num_embeddings:
        raise ScheduleError(
            f"interlaced: each of {num_embeddings} embeddings is in front of as many of the "
            f"{num_workers} workers' layers; use a multiple of {num_embeddings} workers."
        )
    size = num_workers // num_embeddings + 1
    return [range(i * size, (i + 1) * size) for i in range(num_embeddings)]
