"""Segments: runs of parts on one device that no communication interrupts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sequence import Close, Compute, Item, Open
from superscaler_core.materialize.side import Device
from superscaler_core.part import Part


@dataclass(frozen=True, eq=False)
class Segment:
    """Parts that run as one function.

    Attributes:
        name: of the function.
        parts: in order.
        recompute: whether its backward runs its forward again.
        swap: whether what it keeps for its backward waits on the host.
        span: number of the group with which it is run again as a whole; 0 if it is not.
    """

    name: str
    parts: tuple[Part, ...]
    recompute: bool
    swap: bool = False
    span: int = 0


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
    """What every device does in the forward of a stage: segments, and what communicates."""
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
    return {device: tuple(builder.steps) for device, builder in builders.items()}


def _devices(made: Materialized, item: Item) -> Iterable[Device]:
    """Who takes part in communication."""
    if isinstance(item, Open | Close):
        return made.window_devices(item.window)
    assert not isinstance(item, Compute)
    return item.edge.devices
