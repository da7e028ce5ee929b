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
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Step
from superscaler_core.materialize.sequence import Close, MoveStep, Open
from superscaler_core.memory import MemoryChange, MemoryChanges, Peak, changes_of, in_reverse
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import COMPUTING, MOVES, Verb
from superscaler_core.schedules import Action, ActionKind
from superscaler_core.simulator.inside_segment import InsideSegments
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

    Law (tests/superscaler_core/simulator/test_live.py): the largest is the device's peak, unless
    two runs are woven, whose peak is a bound.

    Args:
        compiled: the program.
        timeline: its simulated step.
        profile: profile of every device.
    """
    made = compiled.materialized
    changes = changes_of(made, optimizer=compiled.optimizer, precision=compiled.precision)
    least_ticks = timeline.makespan // RESOLUTION
    levels = _Levels(made, InsideSegments(OpTimes(profile)), least_ticks)
    return {d: _series(changes[d], _Times(timeline, d), levels) for d in timeline.devices}


Point = tuple[int, int]
"""A tick, and a number of bytes."""


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


def _series(changes: MemoryChanges, times: _Times, levels: _Levels) -> Series:
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


def _last_call(inside: StageRun, device: Device) -> int:
    """When the last communication of a run ends that a device waits for."""
    calls = [
        end for work_event, _, end in inside.spans
        if work_event.comm is not None and device in work_event.devices
    ]  # fmt: skip
    return max(calls, default=0)


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


# --- inside runs --------------------------------------------------------------------------------


class _Levels:
    """The memory inside runs; equal runs are computed once.

    Args:
        made: the plan.
        segments: the memory inside segments.
        least_ticks: the duration of a segment from which on its inside is shown.
    """

    def __init__(self, made: Materialized, segments: InsideSegments, least_ticks: int) -> None:
        self._made, self._segments, self._least_ticks = made, segments, least_ticks
        self._places: dict[tuple[int, Device], Mapping[Step, int]] = {}
        # Entries keep the objects alive whose identities are in their keys.
        self._known: dict[tuple[int, int, Device], tuple[object, list[Point]]] = {}

    def inside(self, change: MemoryChange, inside: StageRun, device: Device) -> list[Point]:
        """The peak at the start of each step and the memory at its end, from the run's start."""
        key = id(change.peaks), id(inside), device
        if key not in self._known:
            found = self._found(change, inside, device)
            self._known[key] = (change.peaks, inside), found
        return self._known[key][1]

    def _found(self, change: MemoryChange, inside: StageRun, device: Device) -> list[Point]:
        timed: list[tuple[int, int, int]] = []
        ended: dict[int, int] = {}
        for work_event, start, end in inside.spans:
            does = work_event.does
            if does is None or device not in work_event.devices:
                continue
            number = self._number(change.event, does, device, len(change.peaks))
            if number is not None:
                points = self._within(change.peaks, number, does, device, end - start)
                timed += [(start + tick, number, size) for tick, size in points]
                ended[number] = max(end, ended.get(number, 0))
        if not isinstance(change.event, Action) or change.event.kind is ActionKind.UPDATE:
            # What the work outside runs needs, it needs until it has communicated.
            (peak,) = change.peaks
            return [(0, peak.most_bytes), (_last_call(inside, device), peak.after_bytes)]
        now = 0
        for number, peak in enumerate(change.peaks):
            now = ended.get(number, now)
            # What takes no time follows the step in front of it.
            if number not in ended:
                timed += [(now, number, peak.most_bytes), (now, number, peak.after_bytes)]
        timed.sort(key=lambda point: point[:2])
        return [(tick, size) for tick, _, size in timed]

    def _within(
        self, peaks: Sequence[Peak], number: int, does: StepInstruction, device: Device, ticks: int
    ) -> Iterator[Point]:
        """The memory in one step of a run, from its start."""
        peak = peaks[number]
        if does.kind in COMPUTING and ticks > self._least_ticks:
            segment = self._made.segment(does.name, device)
            before = peaks[number - 1].after_bytes if number else 0
            sizes = before, peak.most_bytes, peak.after_bytes
            levels = self._segments.levels(segment, does.kind, *sizes)
            yield from ((round(share * ticks), size) for share, size in levels)
        else:
            yield from ((0, peak.most_bytes), (ticks, peak.after_bytes))

    def _number(
        self, event: object, does: StepInstruction, device: Device, num_steps: int
    ) -> int | None:
        """The place of an instruction's step in the order of the run; None if it is no step."""
        if not isinstance(event, Action) or self._made.is_of_bucket(does):
            return None
        step = self._step(does, device, in_reverse(event.kind))
        place = None if step is None else self._places_on(event.stage, device).get(step)
        if place is None:
            return None
        return num_steps - 1 - place if in_reverse(event.kind) else place

    def _step(self, does: StepInstruction, device: Device, goes_back: bool) -> Step | None:
        """The step of a stage that an instruction belongs to, as memory counts it."""
        if does.kind in COMPUTING:
            return self._made.segment(does.name, device)
        if does.kind in MOVES:
            return MoveStep(self._made.edge(does.name))
        if does.kind is Verb.REDUCE or (does.kind is Verb.UNSHARD and not goes_back):
            return Open(self._made.subject(does))
        return Close(self._made.subject(does)) if does.kind is Verb.UNSHARD else None

    def _places_on(self, stage: int, device: Device) -> Mapping[Step, int]:
        if (stage, device) not in self._places:
            steps = self._made.stages[stage].steps[device]
            self._places[stage, device] = {step: n for n, step in enumerate(steps)}
        return self._places[stage, device]
