"""Cores: a step of devices that share processors, from the step in which each has its own.

If a machine has more processes than cores, they take turns. While n devices work on c cores, each
advances at ``min(1, c / n)`` of its speed. All slow down alike, so the order of events does not
change. A moment t of the step in which every device has a core of its own moves to the integral of
``max(1, n / c)`` from 0 to t.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from superscaler_core.simulator.stage_run import Span
from superscaler_core.simulator.timeline import Ran, StepTimeline


def on_cores(timeline: StepTimeline, num_cores: float) -> StepTimeline:
    """The step of a timeline on fewer cores than devices; ``num_cores`` is above 0.

    A device works while it computes or communicates, also in the background, but not while it waits
    for others. Waits of ``StepTimeline.waits`` and ``calls`` keep their lengths.

    Laws (tests/superscaler_core/simulator/test_cores.py): on one core a step takes as long as the
    work of all its devices together, on several at least that time divided by their number; if at
    no time more devices work than there are cores, nothing changes.
    """
    clock = _Clock(timeline, num_cores)
    return replace(
        timeline,
        runs=[clock.run(ran) for ran in timeline.runs],
        sends=[
            replace(each, start=clock.at(each.start), end=clock.at(each.end))
            for each in timeline.sends
        ],
        waiting=[
            (device, clock.at(start), clock.at(end)) for device, start, end in timeline.waiting
        ],
        makespan=clock.at(timeline.makespan),
    )


class _Clock:
    """Maps moments of a step with a core per device to moments on few cores."""

    def __init__(self, timeline: StepTimeline, num_cores: float) -> None:
        changes: dict[int, int] = {0: 0}
        for start, end, num in _working(timeline):
            changes[start] = changes.get(start, 0) + num
            changes[end] = changes.get(end, 0) - num
        # Between two neighbouring moments the number of devices that work is constant.
        self._moments = sorted(changes)
        nums = accumulate(changes[moment] for moment in self._moments)
        self._rates = [max(1.0, num / num_cores) for num in nums]
        lengths = (b - a for a, b in zip(self._moments, self._moments[1:], strict=False))
        stretched = (length * rate for length, rate in zip(lengths, self._rates, strict=False))
        self._moved = [0.0, *accumulate(stretched)]

    def at(self, moment: int) -> int:
        """The moment on few cores, in whole ticks."""
        place = bisect_right(self._moments, moment) - 1
        return round(self._moved[place] + (moment - self._moments[place]) * self._rates[place])

    def run(self, ran: Ran) -> Ran:
        """A run on few cores. Runs that were equal before may be stretched differently."""
        start, inside = self.at(ran.start), ran.inside

        def moved(moment: int) -> int:
            return self.at(ran.start + moment) - start

        def spans(given: Iterable[Span]) -> tuple[Span, ...]:
            return tuple((work_event, moved(begin), moved(end)) for work_event, begin, end in given)

        ends, mine, beside = map(moved, inside.ends), spans(inside.spans), spans(inside.beside)
        made = replace(inside, ends=tuple(ends), spans=mine, beside=beside, taken=())
        return Ran(ran.event, start, made)


def _working(timeline: StepTimeline) -> Iterable[tuple[int, int, int]]:
    """Intervals in which devices work: start, end, and the number of these devices."""
    for ran in timeline.runs:
        for work_event, start, end in (*ran.inside.spans, *ran.inside.beside):
            # A wait for communication under way moves no bytes itself, and is no work.
            if work_event.comm is None or work_event.comm.level_bytes:
                yield ran.start + start, ran.start + end, len(work_event.devices)
    for start, end in timeline.starts:
        yield start, end, 1
    for sent in timeline.sends:
        yield sent.start, sent.end, len(sent.comm.devices)
