"""Run memory: how the memory of a device changes inside one run of a stage, in time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Step
from superscaler_core.materialize.sequence import Close, MoveStep, Open
from superscaler_core.memory import MemoryChange, Peak, in_reverse
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.verb import COMPUTING, MOVES, Verb
from superscaler_core.schedules import Action, ActionKind
from superscaler_core.simulator.inside_segment import InsideSegments
from superscaler_core.simulator.stage_run import StageRun

Point = tuple[int, int]
"""A tick, and a number of bytes from then on."""

_Timed = tuple[int, int, int]
"""A tick, the number of a step in the order of the run, and a number of bytes."""

_Placed = tuple[int, StepInstruction, int, int]
"""The number of a step, the instruction that carries it out, and its start and end."""


class RunMemory:
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
        """The memory in addition to what is held before the run; ticks are from the run's start."""
        key = id(change.peaks), id(inside), device
        if key not in self._known:
            is_run = isinstance(change.event, Action) and change.event.kind != ActionKind.UPDATE
            find = self._of_run if is_run else _of_others
            self._known[key] = (change.peaks, inside), find(change, inside, device)
        return self._known[key][1]

    def _of_run(self, change: MemoryChange, inside: StageRun, device: Device) -> list[Point]:
        placed = [*self._placed(change, inside, device)]
        halves = sorted({half for _, does, _, _ in placed if (half := does.half) is not None})
        if len(halves) < 2:
            return self._of_steps(change.peaks, placed, device)
        # The halves of a microbatch do the same at different times, and each keeps half of it.
        found: list[Point] = []
        for half in halves:
            now = 0
            mine = [each for each in placed if each[1].half in (half, None)]
            for tick, size in self._of_steps([*_halved(change.peaks)], mine, device):
                found.append((tick, size - now))
                now = size
        found.sort(key=lambda point: point[0])
        most = max(peak.most_bytes for peak in change.peaks)
        return [*_summed(found, most)]

    def _placed(self, change: MemoryChange, inside: StageRun, device: Device) -> Iterator[_Placed]:
        """What the device does in the steps of a run."""
        for work_event, start, end in inside.spans:
            if work_event.does is not None and device in work_event.devices:
                number = self._number(change.event, work_event.does, device, len(change.peaks))
                if number is not None:
                    yield number, work_event.does, start, end

    def _of_steps(
        self, peaks: Sequence[Peak], placed: Sequence[_Placed], device: Device
    ) -> list[Point]:
        timed: list[_Timed] = []
        ended: dict[int, int] = {}
        for number, does, start, end in placed:
            points = self._within(peaks, number, does, device, end - start)
            timed += [(start + tick, number, size) for tick, size in points]
            ended[number] = max(end, ended.get(number, 0))
        now = 0
        for number, peak in enumerate(peaks):
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

    # --- steps ----------------------------------------------------------------------------------

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


def _of_others(change: MemoryChange, inside: StageRun, device: Device) -> list[Point]:
    """Work outside runs of stages: what it needs, it needs until it has communicated."""
    (peak,) = change.peaks
    calls = [
        end for work_event, _, end in inside.spans
        if work_event.comm is not None and device in work_event.devices
    ]  # fmt: skip
    return [(0, peak.most_bytes), (max(calls, default=0), peak.after_bytes)]


def _halved(peaks: Sequence[Peak]) -> Iterator[Peak]:
    """The share of one half in steps: half of what is kept, and all that is needed meanwhile."""
    before = 0
    for peak in peaks:
        kept = max(before, peak.after_bytes)
        yield Peak.of_bytes(kept // 2 + max(0, peak.most_bytes - kept), peak.after_bytes // 2)
        before = peak.after_bytes


def _summed(differences: Sequence[Point], most: int) -> Iterator[Point]:
    """The sums of differences; the halves' sum is an estimate, and the run's peak is measured."""
    now = 0
    for tick, more in differences:
        now += more
        yield tick, min(now, most)
