"""Cores: a step of devices that share processors, from the step in which each has its own.

Processes of one machine that are more than its cores take turns. While n devices work on c cores,
each advances at ``min(1, c / n)`` of its speed, which is the same for all of them. So the order of
events stays, and a moment t of the step with a core each comes at the integral of ``max(1, n / c)``
from 0 to t.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace
from itertools import accumulate

from superscaler_core.simulator.stage_run import Span, StageRun
from superscaler_core.simulator.timeline import Ran, StepTimeline


def on_cores(timeline: StepTimeline, num_cores: float) -> StepTimeline:
    """The step of a timeline on fewer cores than devices.

    A device works while it computes or communicates, also in the background, but not while it waits
    for others. Waits of ``StepTimeline.waits`` and ``calls`` keep their lengths.

    Laws (tests/superscaler_core/simulator/test_cores.py): on one core a step takes as long as all
    its devices' work together, on several at least its share of that; where no more devices work at
    one time than there are cores, nothing changes.

    Args:
        timeline: of devices with a core each.
        num_cores: above 0.
    """
    clock = _Clock(timeline, num_cores)
    return replace(
        timeline,
        runs=[clock.run(ran) for ran in timeline.runs],
        carries=[
            replace(each, start=clock.at(each.start), end=clock.at(each.end))
            for each in timeline.carries
        ],
        makespan=clock.at(timeline.makespan),
    )


class _Clock:
    """Moments on few cores, from those with a core each."""

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
        """When a moment comes, in whole ticks."""
        place = bisect_right(self._moments, moment) - 1
        return round(self._moved[place] + (moment - self._moments[place]) * self._rates[place])

    def run(self, ran: Ran) -> Ran:
        """A run, whose inside is no longer that of equal runs."""
        start, inside = self.at(ran.start), ran.inside

        def moved(moment: int) -> int:
            return self.at(ran.start + moment) - start

        def spans(given: Iterable[Span]) -> tuple[Span, ...]:
            return tuple((act, moved(begin), moved(end)) for act, begin, end in given)

        ends = tuple(map(moved, inside.ends))
        made = StageRun(
            inside.devices, ends, spans(inside.spans), spans(inside.beside), (), inside.under_way
        )
        return Ran(ran.event, start, made)


def _working(timeline: StepTimeline) -> Iterable[tuple[int, int, int]]:
    """From when to when how many devices work."""
    for ran in timeline.runs:
        for act, start, end in (*ran.inside.spans, *ran.inside.beside):
            # What waits for communication under way moves no bytes itself.
            if act.wire is None or act.wire.level_bytes:
                yield ran.start + start, ran.start + end, len(act.devices)
    for start, end in timeline.starts:
        yield start, end, 1
    for carried in timeline.carries:
        yield carried.start, carried.end, len(carried.wire.devices)
