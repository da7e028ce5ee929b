"""Live: the memory of devices over a step, and the peak of each kind."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import pairwise

from rvdcomm.collector import paused_collector
from superscaler_core.compiled import Compiled
from superscaler_core.cost.comm_cost import TICKS_PER_SEC
from superscaler_core.cost.op_time import OpTimes
from superscaler_core.cost.profile import DeviceProfile
from superscaler_core.memory import MemoryChange, MemoryChanges, changes_of
from superscaler_core.plan import Device
from superscaler_core.schedules import Action
from superscaler_core.simulator.inside_segment import InsideSegments
from superscaler_core.simulator.run_memory import Point, RunMemory
from superscaler_core.simulator.stage_run import StageRun
from superscaler_core.simulator.timeline import Ran, StepTimeline

NAMES = {"grads": "gradients"}
"""Kinds of memory that are named differently here."""


RESOLUTION = 1000
"""Shares of a step: segments that take less are shown by their peaks alone."""

Series = tuple[tuple[float, int], ...]
"""Pairs of time in seconds from the step's start, and bytes from then on."""


def peaks_of(compiled: Compiled) -> dict[Device, dict[str, int]]:
    """The peak, by device and kind; ``"host"`` is host memory."""
    return {
        device: {NAMES.get(kind, kind): size for kind, size in memory.by_kind.items()}
        | ({"host": memory.host_bytes} if memory.host_bytes else {})
        for device, memory in compiled.memory.items()
    }


@paused_collector()
def live_of(
    compiled: Compiled, timeline: StepTimeline, profile: DeviceProfile
) -> Mapping[Device, Series]:
    """Bytes over time, also inside runs, whose steps are segments and communication.

    A segment that takes at least a ``RESOLUTION``-th of the step is shown op by op, by an estimate
    (``inside_segment``). Another step has its peak until it ends, and one that takes no time shows
    as two pairs at one moment.

    Law (tests/superscaler_core/simulator/test_live.py): the largest is the device's peak. It is at
    most that if two runs are woven, whose peak is a bound, or if microbatches run in halves.

    Args:
        compiled: the program.
        timeline: its simulated step.
        profile: profile of every device.
    """
    made = compiled.materialized
    changes = changes_of(made, optimizer=compiled.optimizer, precision=compiled.precision)
    least_ticks = timeline.makespan // RESOLUTION
    levels = RunMemory(made, InsideSegments(OpTimes(profile)), least_ticks)
    return {d: _series(changes[d], _Times(timeline, d), levels) for d in timeline.devices}


class _Times:
    """When the events of one device are."""

    def __init__(self, timeline: StepTimeline, device: Device) -> None:
        self.device = device
        self._runs: dict[object, deque[Ran]] = {}
        for ran in timeline.runs:
            if device in ran.inside.devices:
                # The work before and after all runs is named by its kind.
                event = ran.event if isinstance(ran.event, Action) else ran.event.kind
                self._runs.setdefault(event, deque()).append(ran)
        self._sent: dict[object, int] = {}
        for sent in timeline.sends:
            if device in sent.comm.devices:
                self._sent.setdefault(sent.event, sent.start)

    def run(self, event: object) -> Ran | None:
        """The next run of this event; None if it takes no time."""
        mine = self._runs.get(event)
        return mine.popleft() if mine else None

    def sent(self, event: object, otherwise: int) -> int:
        """When a P2P send begins."""
        return self._sent.get(event, otherwise)


def _series(changes: MemoryChanges, times: _Times, levels: RunMemory) -> Series:
    """The memory of a device, as the sum of the differences that its events make."""
    found: list[Point] = []
    now = 0
    for change in changes.changes:
        ran = times.run(change.event)
        if ran is None:
            start = end = max(now, times.sent(change.event, now))
            points = [(0, size) for p in change.peaks for size in (p.most_bytes, p.after_bytes)]
        else:
            start, end = ran.start, ran.start + _end_of(ran.inside, times.device)
            points = levels.inside(change, ran.inside, times.device)
            now = max(now, end)
        found += _differences(change, start, end, points)
    # Runs of a pair are at the same time; the order of events at one tick is that of the device.
    found.sort(key=lambda point: point[0])
    size = changes.resting_bytes
    series = [(0, size)]
    for tick, more in found:
        size += more
        series.append((tick, size))
    return tuple((tick / TICKS_PER_SEC, size) for tick, size in _without_repeats(series))


def _end_of(inside: StageRun, device: Device) -> int:
    return inside.ends[inside.devices.index(device)]


def _differences(
    change: MemoryChange, start: int, end: int, points: Iterable[Point]
) -> Iterator[Point]:
    """What an event adds over time, relative to the memory before it."""
    now = 0
    for tick, size in points:
        yield start + tick, size - change.freed_bytes - now
        now = size - change.freed_bytes
    yield end, change.net_bytes - now


def _without_repeats(series: Sequence[Point]) -> Iterator[Point]:
    yield series[0]
    yield from (point for before, point in pairwise(series) if point[1] != before[1])
