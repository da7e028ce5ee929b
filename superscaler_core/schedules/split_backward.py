"""Rewrites: backwards in halves, recomputations apart, or all actions on a single worker."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.schedule import Schedule
from superscaler_core.schedules.timeline import timeline


def split_backward(schedule: Schedule, delay: int | Callable[[int], int] = 0) -> Schedule:
    """Replace every B of a schedule by I and W.

    I takes the place of B. With a delay of k, the W of a microbatch comes right after the k-th I
    that follows its own I on the worker; the remaining W's come at the end of the row. So the I's,
    for which earlier stages wait, run earlier, and the activations of k more microbatches are held.

    >>> from superscaler_core.schedules import one_f_one_b
    >>> print(split_backward(one_f_one_b(2, 3), delay=lambda worker: worker))
    1f1b-split stages=2 microbatches=3
    worker 0: 0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
    worker 1: 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2

    Args:
        schedule: a schedule; I's and W's that it already has keep their places.
        delay: k, the same for all workers, or a function of the worker. Workers that share a stage
            need equal delays; above 0, they also need the same order of their common actions, as
            ``timeline`` checks.

    Raises:
        ScheduleError: a delay is below 0.
    """
    rows = []
    for worker, row in enumerate(schedule.rows):
        mine = delay if isinstance(delay, int) else delay(worker)
        if mine < 0:
            raise ScheduleError(f"split_backward: a delay is 0 or more, got {mine}.")
        rows.append(tuple(_halved(row, mine)))
    pairs = frozenset((first, _inputs(then)) for first, then in schedule.pairs)
    return replace(schedule, name=f"{schedule.name}-split", rows=tuple(rows), pairs=pairs)


def _inputs(action: Action) -> Action:
    """The first half of a whole backward; any other action as it is."""
    return replace(action, kind=ActionKind.INPUTS) if action.kind is ActionKind.BACKWARD else action


def _halved(row: tuple[Action, ...], delay: int) -> Iterator[Action]:
    waiting: deque[Action] = deque()
    for action in row:
        if action.kind is not ActionKind.BACKWARD:
            yield action
            continue
        yield _inputs(action)
        waiting.append(replace(action, kind=ActionKind.WEIGHTS))
        if len(waiting) > delay:
            yield waiting.popleft()
    yield from waiting


def recompute_apart(schedule: Schedule, stages: Collection[int] | None = None) -> Schedule:
    """Insert an R right before every B or I of a schedule, or right before its pair.

    A worker that waits for the gradient from the next stage recomputes in the meantime.

    >>> from superscaler_core.schedules import one_f_one_b
    >>> print(recompute_apart(one_f_one_b(2, 2), stages=[0]))
    1f1b-recompute stages=2 microbatches=2
    worker 0: 0F0 0F1 0R0 0B0 0R1 0B1
    worker 1: 1F0 1B0 1F1 1B1

    Args:
        schedule: a schedule; R's that it already has keep their places.
        stages: stages that get an R; all if None.

    Raises:
        ScheduleError: the schedule has no such stage.
    """
    chosen = set(range(schedule.num_stages) if stages is None else stages)
    if not chosen <= set(range(schedule.num_stages)):
        raise ScheduleError(
            f"recompute_apart: stages {sorted(chosen)}; schedule {schedule.name} has stages 0 to "
            f"{schedule.num_stages - 1}."
        )
    rows = []
    for row in schedule.rows:
        found: list[Action] = []
        for action in row:
            again = replace(action, kind=ActionKind.RECOMPUTE, recycling_pass=0)
            if action.kind.goes_back and action.stage in chosen and again not in schedule.places:
                # If the action is in a pair, the R comes before the pair.
                found.insert(len(found) - (action in schedule.partners), again)
            found.append(action)
        rows.append(tuple(found))
    return replace(schedule, name=f"{schedule.name}-recompute", rows=tuple(rows))


def on_one_worker(schedule: Schedule) -> Schedule:
    """The same actions on one worker, in the order in which they start if each takes one unit.

    Of the actions that start together, those of lower stages come first. All actions read the same
    versions of weights as before, so the trained weights are the same.

    >>> from superscaler_core.schedules import SCHEDULES
    >>> print(on_one_worker(SCHEDULES["1f1b"](2, 2)))
    1f1b stages=2 microbatches=2
    worker 0: 0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1
    """
    spans = sorted(
        timeline(schedule).spans.values(),
        key=lambda span: (span.start, span.action.stage, span.action.microbatch),
    )
    return replace(schedule, rows=(tuple(span.action for span in spans),))
