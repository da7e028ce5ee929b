"""Straight pipelines: worker d holds stage d, and runs warm-up forwards before it alternates."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain

from superscaler_core.schedules.action import Action, ActionKind
from superscaler_core.schedules.errors import require_counts
from superscaler_core.schedules.schedule import Schedule


def straight(
    name: str, num_stages: int, num_microbatches: int, num_warmup: Callable[[int], int]
) -> Schedule:
    """A schedule with one worker per stage that is defined by its warm-up alone.

    Args:
        name: name of the schedule.
        num_stages, num_microbatches: at least 1.
        num_warmup: for a stage, the number of forwards before its first forward-backward pair.

    Raises:
        ScheduleError: a count is below 1.
    """
    require_counts(name, num_stages=num_stages, num_microbatches=num_microbatches)
    rows = tuple(
        alternate(
            [
                Action(ActionKind.FORWARD, stage, microbatch)
                for microbatch in range(num_microbatches)
            ],
            [
                Action(ActionKind.BACKWARD, stage, microbatch)
                for microbatch in range(num_microbatches)
            ],
            num_warmup(stage),
        )
        for stage in range(num_stages)
    )
    return Schedule(name, num_stages, num_microbatches, rows)


def alternate(
    forwards: Sequence[Action], backwards: Sequence[Action], num_warmup: int
) -> tuple[Action, ...]:
    """``num_warmup`` forwards, then forward and backward alternating, then the remaining backwards.

    With no warm-up, a backward follows every forward; with a warm-up of all forwards, all forwards
    come first. Values in between trade memory for activations against idle time.

    >>> forwards = [Action.parse(word) for word in ("0F0", "0F1", "0F2")]
    >>> backwards = [Action.parse(word) for word in ("0B0", "0B1", "0B2")]
    >>> " ".join(map(str, alternate(forwards, backwards, 1)))
    '0F0 0F1 0B0 0F2 0B1 0B2'
    """
    num_warmup = min(num_warmup, len(forwards))
    num_pairs = len(forwards) - num_warmup
    pairs = zip(forwards[num_warmup:], backwards[:num_pairs], strict=True)
    return (*forwards[:num_warmup], *chain.from_iterable(pairs), *backwards[num_pairs:])
