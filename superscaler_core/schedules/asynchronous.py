"""Asynchronous pipelines: a run of many minibatches that updates weights during the run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.straight import straight
from superscaler_core.schedules.timeline import timeline
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


def on_one_worker(schedule: Schedule) -> Schedule:
    """The same actions on one worker, in the order in which they start if each takes one unit.

    Of the actions that start together, those of lower stages come first. All actions read the same
    versions of weights as before, so the trained weights are the same.

    >>> print(on_one_worker(with_updates(straight("s", 2, 2, lambda stage: 1 - stage), 1, "stash")))
    s stages=2 microbatches=2 weights=stash
    worker 0: 0F0 0F1 1F0 1B0 0B0 1U0 0U0 1F1 1B1 0B1 1U1 0U1
    """
    spans = sorted(
        timeline(schedule).spans.values(),
        key=lambda span: (span.start, span.action.stage, span.action.microbatch),
    )
    return replace(schedule, rows=(tuple(span.action for span in spans),))


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
