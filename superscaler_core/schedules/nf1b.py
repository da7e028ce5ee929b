"""nF1B: 1F1B of a recycled model; 3F1B has two passes before the pass that is trained."""

from __future__ import annotations

from collections.abc import Iterator

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError, require_counts
from superscaler_core.schedules.schedule import Schedule


def nf1b(num_stages: int, num_microbatches: int, recycle: int = 2) -> Schedule:
    """Run every microbatch ``recycle`` times forward without gradient, then as in 1F1B.

    One worker per stage. A worker runs in waves: in wave w it runs pass t of microbatch w - t, for
    all passes from the first to the pass with gradient, then the backward that 1F1B runs there. So
    a pass of a microbatch comes ``recycle + 3`` actions after its previous pass. If that is at
    least D, the result of the last stage arrives before the first stage needs it, and no worker
    waits once the pipeline is full; otherwise workers wait in every wave. Worker d holds ``D - d``
    microbatches. With ``recycle`` 0 it is 1F1B.

    >>> print(nf1b(2, 2, 1))
    nf1b stages=2 microbatches=2
    worker 0: 0f0 0f1 0F0 0F1 0B0 0B1
    worker 1: 1f0 1f1 1F0 1B0 1F1 1B1

    Raises:
        ScheduleError: a count is below 1, or there are fewer than D microbatches.

    Source: the numbers of forwards between backwards are those of SuperScaler's code for
    AlphaFold2; the assignment of passes and microbatches to them is our own.
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
    """The actions of a worker, wave by wave.

    An action waits only for actions of its own wave at earlier stages, or of earlier waves; so for
    all counts some worker can always continue.
    """
    microbatches = range(num_microbatches)
    lag = num_stages - 1 - stage
    for wave in range(recycle + num_microbatches + lag):
        for number in range(recycle):
            if wave - number in microbatches:
                yield Action(ActionKind.RECYCLE, stage, wave - number, number)
        if wave - recycle in microbatches:
            yield Action(ActionKind.FORWARD, stage, wave - recycle)
        if wave - recycle - lag in microbatches:
            yield Action(ActionKind.BACKWARD, stage, wave - recycle - lag)
