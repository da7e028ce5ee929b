"""Segments: runs of parts on one device that no communication interrupts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from weakref import WeakKeyDictionary

import rvdcomm as rv
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sequence import Close, Compute, Item, Move, Open
from superscaler_core.materialize.side import Device
from superscaler_core.part import Part
from superscaler_core.tensor import PTensor


@dataclass(frozen=True, eq=False)
class Segment:
    """Parts that run as one function.

    Attributes:
        name: of the function.
        parts: in order.
        recompute: whether its backward runs its forward again.
        swap: whether what it keeps for its backward waits on the host.
        span: number of the group with which it is run again as a whole; 0 if it is not.
        is_left_out: whether the span's second run leaves it out: its own backward runs its forward
            again, and nothing else in the span reads what it makes.
    """

    name: str
    parts: tuple[Part, ...]
    recompute: bool
    swap: bool = False
    span: int = 0
    is_left_out: bool = False


Step = Segment | Item


@dataclass
class _Builder:
    """The steps of one device so far, and the parts of its segment that is still open."""

    stage: int
    steps: list[Step] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    group: tuple[int, int, int] = (0, 0, 0)
    num_segments: int = 0

    def add(self, part: Part, group: tuple[int, int, int]) -> None:
        if group != self.group:
            self.close()
        self.group = group
        self.parts.append(part)

    def close(self) -> None:
        if not self.parts:
            return
        name = f"stage{self.stage}_segment{self.num_segments}"
        recompute, swap, span = self.group
        self.steps.append(Segment(name, tuple(self.parts), recompute > 0, swap > 0, span))
        self.parts, self.num_segments = [], self.num_segments + 1


def stage_steps(made: Materialized, stage: int) -> Mapping[Device, tuple[Step, ...]]:
    """What every device does in the forward of a stage: segments, and what communicates.

    All who ask are given the same segments.
    """
    found = _FOUND.setdefault(made, {})
    if stage not in found:
        found[stage] = _stage_steps(made, stage)
    return found[stage]


_FOUND: WeakKeyDictionary[Materialized, dict[int, Mapping[Device, tuple[Step, ...]]]] = (
    WeakKeyDictionary()
)


def _stage_steps(made: Materialized, stage: int) -> Mapping[Device, tuple[Step, ...]]:
    builders: dict[Device, _Builder] = {}
    for item in made.items[stage]:
        if isinstance(item, Compute):
            builder = builders.setdefault(item.device, _Builder(stage))
            plan, part = made.plan, item.part
            span = made.spans[stage].get(item, 0)
            builder.add(part, (plan.recompute_group(part), plan.swap_group(part), span))
            continue
        for device in _devices(made, item):
            builder = builders.setdefault(device, _Builder(stage))
            builder.close()
            builder.steps.append(item)
    for builder in builders.values():
        builder.close()
    return {
        device: _with_left_out(made, stage, device, builder.steps)
        for device, builder in builders.items()
    }


# --- what a second run leaves out ---------------------------------------------------------------


def _with_left_out(
    made: Materialized, stage: int, device: Device, steps: Sequence[Step]
) -> tuple[Step, ...]:
    """The steps, with what the second run of each span leaves out marked as such."""
    spans = made.spans[stage]
    found: list[Step] = []
    for span, run in groupby(
        steps, lambda s: s.span if isinstance(s, Segment) else spans.get(s, 0)
    ):
        inside = list(run)
        if span and any(isinstance(step, Segment) and step.recompute for step in inside):
            reads = _reads(made, device, inside)
            inside = [_marked(step, reads) for step in inside]
        found += inside
    return tuple(found)


_Reads = Mapping[PTensor, Sequence[tuple[Step, rv.Box]]]
"""By tensor, which steps read which box of it where this device made it."""


def _reads(made: Materialized, device: Device, steps: Iterable[Step]) -> _Reads:
    found: dict[PTensor, list[tuple[Step, rv.Box]]] = {}
    for step in steps:
        if isinstance(step, Segment):
            for part in step.parts:
                for position, view in enumerate(part.inputs):
                    if (part.op, position) not in made.edges.of_reader:
                        found.setdefault(view.tensor, []).append((step, view.box))
        elif isinstance(step, Move) and device in step.edge.src.shards:
            edge = step.edge
            found.setdefault(edge.tensor, []).append((step, edge.src.shards[device].box))
    return found


def _marked(step: Step, reads: _Reads) -> Step:
    if not isinstance(step, Segment) or not step.recompute:
        return step
    is_read = any(
        reader is not step and box.intersect(view.box) is not None
        for part in step.parts
        for view in part.outputs
        for reader, box in reads.get(view.tensor, ())
    )
    return step if is_read else replace(step, is_left_out=True)


# --- who takes part -----------------------------------------------------------------------------


def _devices(made: Materialized, item: Item) -> Iterable[Device]:
    """Who takes part in communication."""
    if isinstance(item, Open | Close):
        return made.window_devices(item.window)
    assert not isinstance(item, Compute)
    return item.edge.devices
