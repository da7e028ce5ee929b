"""Timeline: when each action of a schedule starts and ends, and how long workers are idle."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from graphlib import CycleError, TopologicalSorter

from superscaler_core.schedules.action import KINDS, Action, ActionKind
from superscaler_core.schedules.dataflow import Edges, Waits, waits_of
from superscaler_core.schedules.deadlock import explain_deadlock
from superscaler_core.schedules.errors import ScheduleError
from superscaler_core.schedules.schedule import Pair, Schedule

Time = int | Fraction
"""Exact numbers, so that equal times are equal; use ``Fraction(secs)`` for a measured float."""

Durations = Mapping[str | tuple[str, int], Time]
"""Time of an action by kind, ``{"F": 1, "B": 2}`` or ``{"F": 1, "I": 1, "W": 1}``.

``("F", 3)`` overrides ``"F"`` for stage 3. ``"F&B"`` (or ``"F&I"``) is the time of a pair, whose
two actions then start and end together; without it they run one after the other. An update takes no
time unless ``"U"`` is given.
"""

EQUAL: Durations = dict.fromkeys(KINDS, 1)


@dataclass(frozen=True, slots=True)
class Span:
    """An action with its time: from ``start`` up to, not including, ``end``."""

    action: Action
    start: Time
    end: Time


@dataclass(frozen=True, slots=True)
class Timeline:
    """A schedule in time: every action starts as soon as its worker and its data allow.

    Three different figures are called "the bubble" in the literature; each property states which
    one it is. All are exact.

    Attributes:
        schedule: the schedule that is run.
        rows: for each worker the spans of its actions, in its order; time starts at 0.
    """

    schedule: Schedule
    rows: tuple[tuple[Span, ...], ...]

    @property
    def spans(self) -> dict[Action, Span]:
        """Every action with its span; the dict is built at each call."""
        return {span.action: span for row in self.rows for span in row}

    @property
    def makespan(self) -> Time:
        """Time from the start of the first action to the end of the last."""
        return max(row[-1].end for row in self.rows)

    @property
    def busy(self) -> tuple[Time, ...]:
        """Time in which each worker runs actions; that of a pair counts once."""
        times = ({(span.start, span.end) for span in row} for row in self.rows)
        return tuple(sum(end - start for start, end in own) for own in times)

    @property
    def idle(self) -> tuple[Time, ...]:
        """Time of the makespan in which each worker runs no action."""
        return tuple(self.makespan - busy for busy in self.busy)

    @property
    def bubble_of_makespan(self) -> Fraction:
        """Idle time divided by makespan, summed over all workers: a share, below 1.

        Source: the bubble of the GPipe and Chimera papers; for 1F1B it is
        ``(D - 1) / (N + D - 1)``.
        """
        return Fraction(sum(self.idle)) / (self.makespan * len(self.rows))

    @property
    def bubble_of_ideal(self) -> Fraction:
        """Idle time divided by busy time, summed over all workers: may be above 1.

        Source: Narayanan et al. 2021 (Megatron-LM), "bubble time fraction"; 1F1B has
        ``(D - 1) / N``.
        """
        return Fraction(sum(self.idle)) / sum(self.busy)

    @property
    def bubble_of_span(self) -> Fraction:
        """``1 - most busy time / longest span``; a worker's span is its first start to last end.

        Waiting before a worker's first action and after its last is left out, so workers may be
        idle at the ends of a step even if this is 0.

        Source: Qi et al. 2023 (zero bubble), ``1 - N (F + B) / longest span``, for equal stages;
        with unequal stages, the busiest worker's time is the shortest possible span.
        """
        longest = max(row[-1].end - row[0].start for row in self.rows)
        return 1 - Fraction(max(self.busy)) / longest

    @property
    def peak_microbatches(self) -> tuple[int, ...]:
        """As ``Schedule.peak_microbatches``, because it depends only on the order."""
        return self.schedule.peak_microbatches


def timeline(
    schedule: Schedule, durations: Durations = EQUAL, edges: Edges | None = None
) -> Timeline:
    """Compute the timeline of ``schedule`` for given durations.

    >>> from superscaler_core.schedules import one_f_one_b
    >>> times = timeline(one_f_one_b(4, 8), {"F": 1, "B": 2})
    >>> times.makespan, times.bubble_of_makespan, times.peak_microbatches
    (33, Fraction(3, 11), (4, 3, 2, 1))

    Args:
        schedule: the schedule.
        durations: time of each action, in any unit; every action lasts 1 by default.
        edges: the stage graph, pairs ``(src, dst)``; a chain of stages if None.

    Raises:
        ScheduleError: actions wait for each other (the message shows the cycle and the orders that
            cause it), a duration is missing or not above 0, or an edge names an unknown stage.
    """
    waits = waits_of(schedule, edges)
    beside = {one: pair for pair in schedule.pairs if _name(pair) in durations for one in pair}
    for first, then in set(beside.values()):
        # Both actions wait for all that either of them waits for, but not for each other.
        both = [w for w in (*waits[first], *waits[then]) if w.on not in (first, then)]
        waits[first] = waits[then] = both
    spans: dict[Action, Span] = {}
    for action in _in_order(schedule, waits):
        start = max((spans[wait.on].end for wait in waits[action]), default=0)
        name = _name(beside[action]) if action in beside else action.kind
        spans[action] = Span(action, start, start + duration_of(name, action.stage, durations))
    return Timeline(schedule, tuple(tuple(spans[a] for a in row) for row in schedule.rows))


def _name(pair: Pair) -> str:
    """The key of a pair's time in durations: ``F&B``."""
    return "&".join(action.kind for action in pair)


def _in_order(schedule: Schedule, waits: Waits) -> list[Action]:
    """All actions, each after those that it waits for."""
    sorter = TopologicalSorter({a: [wait.on for wait in ws] for a, ws in waits.items()})
    # With a cycle it still yields the actions that can run; ``explain_deadlock`` reports the rest
    # better than graphlib's error.
    with suppress(CycleError):
        sorter.prepare()
    order: list[Action] = []
    while ready := sorter.get_ready():
        order += ready
        sorter.done(*ready)
    if len(order) < len(waits):
        raise ScheduleError(explain_deadlock(schedule, waits, set(order)))
    return order


def duration_of(name: str, stage: int, durations: Durations) -> Time:
    """The time at a stage of an action, by its kind, or of a pair, by both kinds.

    Raises:
        ScheduleError: the time is missing, or not above 0.
    """
    duration = durations.get((name, stage), durations.get(name))
    if name == ActionKind.UPDATE and not duration:
        return 0
    if not isinstance(duration, int | Fraction) or duration <= 0:
        raise ScheduleError(
            f"duration of {name} at stage {stage} is an int or a Fraction above 0, "
            f"got {duration!r} from {dict(durations)!r}."
        )
    return duration
