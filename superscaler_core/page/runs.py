"""Runs: the timeline of a simulated step as lists of numbers, with equal runs stored once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from superscaler_core.page.edge_rows import EdgeRows
from superscaler_core.page.layer_rows import LayerRows
from superscaler_core.plan import Device
from superscaler_core.program import COMPUTING
from superscaler_core.simulator import COLOURS, HIDDEN, KINDS, Ran, StageRun, StepTimeline, activity

MAX_ROWS = 64
"""Most devices that are shown; of more devices a regular sample is shown."""

MAX_SPANS = 120_000
"""Most acts inside runs. Further runs are shown as one act each: at 30 bytes an act, a page of so
many has 4 MB."""

TICKS_PER_NS = 1000

BACKGROUND = "communication in the background"
"""Started while the device goes on; where it has to wait for it, its bar says communication."""

ACTIVITIES = [BACKGROUND if name == HIDDEN else name for name in COLOURS]


class Runs:
    """The timeline of a step.

    Args:
        timeline: the simulated step.
        layers: takes the segments that run.
        edges: knows the rows of communication.

    Attributes:
        devices: the devices that are shown.
        notes: what is left out, for people.
    """

    def __init__(self, timeline: StepTimeline, layers: LayerRows, edges: EdgeRows) -> None:
        self._timeline, self._layers, self._edges = timeline, layers, edges
        stride = -(-len(timeline.devices) // MAX_ROWS)
        self.devices = timeline.devices[::stride]
        self.notes: list[str] = []
        if stride > 1:
            self.notes.append(
                f"Of {len(timeline.devices)} devices every {stride}th is shown: "
                f"{len(self.devices)} in all."
            )
        self._shown = {*self.devices}
        self._groups: dict[tuple[Device, ...], int] = {}
        self._names: dict[str, int] = {}
        self._num_spans = 0

    @property
    def value(self) -> dict[str, Any]:
        """For JSON. Times are whole nanoseconds from the step's start, or from a run's start.

        ``runs`` have a title, a stage, a microbatch, a start and the number of an inside. An inside
        has ``spans`` in the foreground and ``beside`` in the background: the number of a group of
        devices, an activity, a name, a start, a duration, a segment or -1, and an edge row or -1.
        """
        insides: list[dict[str, Any]] = []
        # The timeline keeps its runs alive, so their identities are unique.
        numbers: dict[int, int] = {}
        runs, num_short = [], 0
        for ran in self._timeline.runs:
            if id(ran.inside) not in numbers:
                numbers[id(ran.inside)] = len(insides)
                insides.append(self._inside(ran))
            number = numbers[id(ran.inside)]
            num_short += insides[number]["short"]
            event = ran.event
            title = self._name(KINDS[event.kind] if event.stage >= 0 else f"{event.kind} of step")
            runs.append([title, event.stage, event.microbatch, _ns(ran.start), number])
        if num_short:
            self.notes.append(
                f"{num_short} of {len(runs)} runs are shown without their inside: a page has at "
                f"most {MAX_SPANS} acts."
            )
        return {
            "ns": _ns(self._timeline.makespan),
            "devices": list(self.devices),
            "activities": [[name, c] for name, c in zip(ACTIVITIES, COLOURS.values(), strict=True)],
            "runs": runs,
            "insides": insides,
            "sends": list(self._sends()),
            "waits": [
                [device, _ns(start), _ns(end) - _ns(start)]
                for device, start, end in self._timeline.waiting if device in self._shown
            ],
            "names": list(self._names),
            "groups": [list(group) for group in self._groups],
        }  # fmt: skip

    def _inside(self, ran: Ran) -> dict[str, Any]:
        inside = ran.inside
        is_short = self._num_spans + len(inside.spans) + len(inside.beside) > MAX_SPANS
        if is_short:
            spans = [*self._outline(ran)]
        else:
            spans = [*self._spans(ran, inside.spans)]
        beside = [] if is_short else [*self._spans(ran, inside.beside, BACKGROUND)]
        self._num_spans += len(spans) + len(beside)
        return {"spans": spans, "beside": beside, "short": is_short}

    def _spans(self, ran: Ran, spans: Sequence[Any], name: str = "") -> Iterator[list[int]]:
        for work_event, start, end in spans:
            devices = [device for device in work_event.devices if device in self._shown]
            if not devices:
                continue
            does, segment = work_event.does, -1
            if does is not None and does.kind in COMPUTING:
                segment = self._layers.segment(does.name, work_event.devices[0])
            yield [
                self._group(devices),
                ACTIVITIES.index(name or activity(ran.event, work_event)),
                self._name(work_event.name),
                _ns(start),
                _ns(end) - _ns(start),
                segment,
                self._edges.of_instruction(does),
            ]

    def _outline(self, ran: Ran) -> Iterator[list[int]]:
        """A run as one act on each device."""
        inside, kind = ran.inside, ACTIVITIES.index(KINDS[ran.event.kind])
        for device, end in zip(inside.devices, inside.ends, strict=True):
            begin = _begin(inside, device)
            if device in self._shown and begin is not None:
                title = self._name("a whole run")
                length = _ns(end) - _ns(begin)
                yield [self._group([device]), kind, title, _ns(begin), length, -1, -1]

    def _sends(self) -> Iterator[list[Any]]:
        """Transfers between stages: group, name, microbatch, start, duration, edge row."""
        for sent in self._timeline.sends:
            devices = [device for device in sent.comm.devices if device in self._shown]
            if devices:
                of = "gradient of " if sent.event.is_back else ""
                times = _ns(sent.start), _ns(sent.end) - _ns(sent.start)
                name = self._name(f"{of}{sent.tensor}")
                row = self._edges.of_send(sent.event)
                yield [self._group(devices), name, sent.event.microbatch, *times, row]

    def _name(self, text: str) -> int:
        return self._names.setdefault(text, len(self._names))

    def _group(self, devices: Iterable[Device]) -> int:
        return self._groups.setdefault(tuple(devices), len(self._groups))


def _begin(inside: StageRun, device: Device) -> int | None:
    """When a device begins its part of a run."""
    starts = (start for event, start, _ in inside.spans if device in event.devices)
    return next(starts, None)


def _ns(ticks: int) -> int:
    return round(ticks / TICKS_PER_NS)
