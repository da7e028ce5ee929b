"""AMPNet (Gaunt et al., 2017) and PipeMare (Yang et al., 2021) keep one version of weights."""

from __future__ import annotations

from superscaler_core.schedules.asynchronous import without_flush
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.versions import WeightRule


def ampnet(num_stages: int, num_microbatches: int, *, every: int = 1) -> Schedule:
    """1F1B without a flush: stages update at once and keep one version, which all actions read.

    At stage s of D, a backward reads weights that are up to ``D - 1 - s`` updates (of one
    microbatch) newer than the weights of its forward. AMPNet chooses the next action at run time;
    this order is that of equal stages with at most D microbatches in flight.

    >>> print(ampnet(2, 3))
    ampnet stages=2 microbatches=3 weights=newest
    worker 0: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2
    worker 1: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2

    Args:
        num_stages, num_microbatches: at least 1.
        every: number of microbatches per update.

    Raises:
        ScheduleError: a count is below 1, or ``every`` does not divide the microbatches.
    """
    return without_flush("ampnet", num_stages, num_microbatches, every, WeightRule.NEWEST)


def pipemare(num_stages: int, num_microbatches: int, *, every: int = 1) -> Schedule:
    """One version of weights, and as many microbatches in flight as PipeMare's delays say.

    Stage s of D runs ``2 (D - 1 - s) + 1`` forwards ahead of its backwards, so the weights of a
    forward are on average ``(2 (D - 1 - s) + 1) / every`` updates old when its gradient is applied.
    ``run.pipemare.PipeMare`` corrects for this delay.

    >>> print(pipemare(2, 4))
    pipemare stages=2 microbatches=4 weights=newest
    worker 0: 0F0 0F1 0F2 0F3 0B0 0U0 0B1 0U1 0B2 0U2 0B3 0U3
    worker 1: 1F0 1F1 1B0 1U0 1F2 1B1 1U1 1F3 1B2 1U2 1B3 1U3

    Args:
        num_stages, num_microbatches: at least 1.
        every: number of microbatches per update (N of the paper).

    Raises:
        ScheduleError: a count is below 1, or ``every`` does not divide the microbatches.

    Source: Yang et al., PipeMare, MLSys 2021: the delays of its section 2, from memory of the
    paper, and unchecked.
    """

    def num_warmup(stage: int) -> int:
        return 2 * (num_stages - 1 - stage) + 1

    rule = WeightRule.NEWEST
    return without_flush("pipemare", num_stages, num_microbatches, every, rule, num_warmup)
