"""Activities: what devices do in a simulated step, with colours; also what they do meanwhile."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from superscaler_core.plan import Device
from superscaler_core.schedules import Action, ActionKind
from superscaler_core.simulator.timeline import Outside, Ran, StepTimeline
from superscaler_core.simulator.work import WorkEvent

HIDDEN = "hidden communication"
"""Communication during which the device does something else."""

COLOURS = {
    "forward": "#4c9be8",
    "backward": "#2a9d6f",
    "gradients of weights": "#8fcf9f",
    "recomputation": "#6f95c4",
    "no gradient": "#b9c7d6",
    "communication": "#e07a3f",
    HIDDEN: "#f0b48a",
    "weights": "#c9a227",
    "optimizer": "#7d5ba6",
}
"""Colours of activities; "communication" is that for which a device waits."""

KINDS = {
    ActionKind.FORWARD: "forward",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUTS: "backward",
    ActionKind.WEIGHTS: "gradients of weights",
    ActionKind.RECOMPUTE: "recomputation",
    ActionKind.RECYCLE: "no gradient",
    ActionKind.UPDATE: "optimizer",
    "begin": "weights",
    "end": "weights",
}

Interval = tuple[int, int]
"""Start and end, in ticks."""


def activity(event: Action | Outside, work_event: WorkEvent) -> str:
    """What a device does in the foreground, a key of ``COLOURS``."""
    if work_event.name == "optimizer":
        return "optimizer"
    if work_event.comm is None:
        return KINDS[event.kind]
    return "weights" if event.stage < 0 else "communication"


def background(ran: Ran) -> Iterator[tuple[WorkEvent, int, int]]:
    """What a run starts in the background, with its start and end from the step's start."""
    for work_event, start, end in ran.inside.beside:
        yield work_event, ran.start + start, ran.start + end


def hidden(timeline: StepTimeline) -> Mapping[Device, Sequence[Interval]]:
    """For each device, when communication is under way for which it does not wait.

    Law (tests/superscaler_core/simulator/test_activities.py): no device waits for communication in
    these intervals.
    """
    under_way: dict[Device, list[Interval]] = {device: [] for device in timeline.devices}
    waited: dict[Device, list[Interval]] = {device: [] for device in timeline.devices}
    for ran in timeline.runs:
        for work_event, start, end in background(ran):
            for device in work_event.devices:
                under_way[device].append((start, end))
        for work_event, start, end in ran.inside.spans:
            for device in work_event.devices if work_event.comm is not None else ():
                waited[device].append((ran.start + start, ran.start + end))
    for sent in timeline.sends:
        for device in sent.comm.devices:
            under_way[device].append((sent.start, sent.end))
    for device, start, end in timeline.waiting:
        waited[device].append((start, end))
    return {d: tuple(_without(_union(under_way[d]), _union(waited[d]))) for d in timeline.devices}


def _union(intervals: Iterable[Interval]) -> list[Interval]:
    """The intervals in order, with those that overlap or touch as one."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        elif end > start:
            found.append((start, end))
    return found


def _without(intervals: Sequence[Interval], others: Sequence[Interval]) -> Iterator[Interval]:
    """The parts of intervals that lie in none of the others; both are unions."""
    place = 0
    for start, end in intervals:
        while place < len(others) and others[place][1] <= start:
            place += 1
        now, other = start, place
        while other < len(others) and others[other][0] < end:
            if others[other][0] > now:
                yield now, others[other][0]
            now = max(now, others[other][1])
            other += 1
        if now < end:
            yield now, end
