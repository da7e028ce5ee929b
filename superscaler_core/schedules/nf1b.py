"""nF1B: 1F1B of a model that is recycled; 3F1B with two turns before the one that is trained."""

from __future__ import annotations

from collections.abc import Iterator

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError, require_counts
from superscaler_core.schedules.schedule import Schedule


def nf1b(num_stages: int, num_microbatches: int, recycle: int = 2) -> Schedule:
    """Every microbatch runs ``recycle`` times forward without gradient, then as under 1F1B.

    One worker a stage. A worker goes by waves: in wave w it runs turn t of microbatch w - t, for
    all turns from the first to the one with gradient, then the backward that 1F1B has there. So a
    turn of a microbatch comes ``recycle + 3`` actions after the one before. If that is at least D,
    what the last stage made is there when the first wants it, and once the pipeline is full nobody
    waits; if not, workers wait in every wave. Worker d holds ``D - d`` microbatches.

    >>> print(nf1b(2, 2, 1))
    nf1b stages=2 microbatches=2
    worker 0: 0f0 0f1 0F0 0F1 0B0 0B1
    worker 1: 1f0 1f1 1F0 1B0 1F1 1B1

    Args:
        num_stages: D, at least 1.
        num_microbatches: N, at least D.
        recycle: turns without gradient of a microbatch; 0 is 1F1B.

    Raises:
        ScheduleError: a count is too small.

    Source: the numbers of forwards and backwards between one another are those of SuperScaler's
    code for AlphaFold2; which turn of which microbatch each is, is said here.
    """
    require_counts("nf1b", num_stages=num_stages, num_microbatches=num_microbatches)
    if num_microbatches < num_stages:
        raise ScheduleError(
            f"nf1b: {num_microbatches} microbatches through {num_stages} stages; it takes at least "
            f"{num_stages}, so that one can be on its way back to the first stage."
        )
    if recycle < 0:
        raise ScheduleError(f"nf1b: recycle is 0 or more, got {recycle}.")
    rows = tuple(
        tuple(_row(stage, num_stages, num_microbatches, recycle)) for stage in range(num_stages)
    )
    return Schedule("nf1b", num_stages, num_microbatches, rows)


def _row(stage: int, num_stages: int, num_microbatches: int, recycle: int) -> Iterator[Action]:
    """A worker's actions, wave by wave.

    An action waits for others of its own wave at stages before it, or of earlier waves alone; so
    whatever the counts, some worker can always go on.
    """
    microbatches = range(num_microbatches)
    lag = num_stages - 1 - stage
    for wave in range(recycle + num_microbatches + lag):
        for turn in range(recycle):
            if wave - turn in microbatches:
                yield Action(ActionKind.TURN, stage, wave - turn, turn)
        if wave - recycle in microbatches:
            yield Action(ActionKind.FORWARD, stage, wave - recycle)
        if wave - recycle - lag in microbatches:
            yield Action(ActionKind.BACKWARD, stage, wave - recycle - lag)
