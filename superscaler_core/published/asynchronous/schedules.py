"""Asynchronous schedules: a run of many minibatches that updates weights during the run.

PipeDream (Narayanan et al., 2019), PipeDream-2BW (Narayanan et al., 2021), AMPNet (Gaunt et al.,
2017) and PipeMare (Yang et al., 2021).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.straight import straight
from superscaler_core.schedules.versions import GRADS, WeightRule


def with_updates(schedule: Schedule, every: int, weights: WeightRule) -> Schedule:
    """Let each stage update its weights after the gradients of every ``every`` microbatches.

    >>> from superscaler_core.schedules import one_f_one_b
    >>> print(with_updates(one_f_one_b(2, 4), 2, WeightRule.STASH))
    1f1b stages=2 microbatches=4 weights=stash
    worker 0: 0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U3
    worker 1: 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3

    Args:
        schedule: a schedule without updates, whose stages are on one worker each.
        every: number of microbatches per update; it divides the number of microbatches.
        weights: the rule that says which versions of weights are read.

    Raises:
        ScheduleError: ``every`` does not divide the microbatches, or a stage has copies.
    """
    if every < 1 or schedule.num_microbatches % every:
        raise ScheduleError(
            f"schedule {schedule.name} of {schedule.num_microbatches} microbatches: an update "
            f"after every {every} leaves some without an update."
        )
    if len(schedule.routes) > 1:
        raise ScheduleError(
            f"schedule {schedule.name} has {len(schedule.routes)} routes of microbatches: copies "
            "of a stage cannot be updated apart."
        )
    rows = tuple(tuple(_updated(row, every)) for row in schedule.rows)
    return replace(schedule, rows=rows, weights=weights)


def _updated(row: tuple[Action, ...], every: int) -> Iterator[Action]:
    done: Counter[int] = Counter()
    for action in row:
        yield action
        if action.kind in GRADS:
            done[action.stage] += 1
            if done[action.stage] % every == 0:
                yield Action(ActionKind.UPDATE, action.stage, done[action.stage] - 1)


def without_flush(
    name: str,
    num_stages: int,
    num_microbatches: int,
    every: int,
    weights: WeightRule,
    num_warmup: Callable[[int], int] | None = None,
) -> Schedule:
    """A straight pipeline that is filled once and drained once.

    Args:
        name: name of the schedule.
        num_stages, num_microbatches: at least 1.
        every: number of microbatches per update.
        weights: the rule that says which versions of weights are read.
        num_warmup: as in ``straight``; the warm-up of 1F1B if None.

    Raises:
        ScheduleError: a count is below 1, or ``every`` does not divide the microbatches.
    """
    warmup = num_warmup or (lambda stage: num_stages - 1 - stage)
    return with_updates(straight(name, num_stages, num_microbatches, warmup), every, weights)


def pipedream(
    num_stages: int, num_microbatches: int, *, every: int = 1, vertical: bool = False
) -> Schedule:
    """1F1B without a flush: stages update at once, and stash the versions that are still read.

    With an update per microbatch (a *minibatch* of the paper), stage s of D keeps ``D - s``
    versions of its weights; the gradient of an update is computed with weights that are
    ``D - 1 - s`` updates old. With vertical sync every stage keeps D versions, and all gradients
    are ``D - 1`` updates old. Between fill and drain no worker is idle if stages are equal.

    >>> print(pipedream(2, 3))
    pipedream stages=2 microbatches=3 weights=stash
    worker 0: 0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2
    worker 1: 1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2

    Args:
        num_stages, num_microbatches: at least 1.
        every: number of microbatches per update.
        vertical: whether all stages read the version that stage 0 read (vertical sync).

    Raises:
        ScheduleError: a count is below 1, or ``every`` does not divide the microbatches.

    Source: Narayanan et al., PipeDream, SOSP 2019: sections 3.2 and 3.3.
    """
    rule = WeightRule.VERTICAL if vertical else WeightRule.STASH
    return without_flush("pipedream", num_stages, num_microbatches, every, rule)


def pipedream_2bw(num_stages: int, num_microbatches: int, *, every: int = 0) -> Schedule:
    """PipeDream with two versions of weights: updates have enough microbatches for two to suffice.

    All stages compute update t from version ``t - 1`` of the weights, and the first update from
    version 0: ``w(t+1) = w(t) - lr * grad(w(t-1))``. This is vertical sync with at least D
    microbatches in an update. A pipeline of one stage has no delay, and keeps one version.

    >>> print(pipedream_2bw(2, 4))
    pipedream-2bw stages=2 microbatches=4 weights=vertical
    worker 0: 0F0 0F1 0B0 0F2 0B1 0U1 0F3 0B2 0B3 0U3
    worker 1: 1F0 1B0 1F1 1B1 1U1 1F2 1B2 1F3 1B3 1U3

    Args:
        num_stages, num_microbatches: at least 1.
        every: number of microbatches per update, at least ``num_stages``; 0 means ``num_stages``.

    Raises:
        ScheduleError: a count is below 1, or ``every`` is below ``num_stages`` or does not divide
            the microbatches.

    Source: Narayanan et al., Memory-Efficient Pipeline-Parallel DNN Training, ICML 2021. The
    formula is from memory of the paper, and unchecked.
    """
    size = every or num_stages
    if size < num_stages:
        raise ScheduleError(
            f"pipedream-2bw of {num_stages} stages: an update of {size} microbatches needs more "
            f"than two versions of weights; let it have {num_stages} or more."
        )
    name = "pipedream-2bw"
    return without_flush(name, num_stages, num_microbatches, size, WeightRule.VERTICAL)


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
    ``PipeMare`` corrects for this delay.

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
