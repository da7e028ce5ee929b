"""Segments: runs of parts on one device that no communication interrupts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import rvdcomm as rv
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, Plan
from superscaler_core.program.bias import products_of
from superscaler_core.program.edges import Edge, Edges
from superscaler_core.program.sequence import Compute, Item, Move


@dataclass(frozen=True, eq=False)
class Segment:
    """Parts that run as one function.

    Attributes:
        name: of the function.
        parts: in order.
        recompute: whether its backward runs its forward again.
        swap: whether what it keeps for its backward waits on the host.
        span: number of the group with which it is run again as a whole; 0 if it is not.
        has_backward: whether something that leaves it has a gradient.
        is_left_out: whether the span's second run leaves it out: its own backward runs its forward
            again, and nothing else in the span reads what it makes.
        products: as of ``products_of``: sums that are made by a product among the parts.
    """

    name: str
    parts: tuple[Part, ...]
    recompute: bool
    swap: bool = False
    span: int = 0
    has_backward: bool = False
    is_left_out: bool = False
    products: Mapping[Part, Part] = field(default_factory=dict)


Step = Segment | Item


@dataclass(frozen=True)
class StageItems:
    """What a stage does in its forward, and what decides how it is put in order.

    Attributes:
        plan: the decisions.
        stage: which.
        items: in one order for all devices.
        spans: by item, the group with which it is run again as a whole.
        taking_part: by item that communicates, the devices that take part.
        edges: of the plan.
    """

    plan: Plan
    stage: int
    items: Sequence[Item]
    spans: Mapping[Item, int]
    taking_part: Mapping[Step, Sequence[Device]]
    edges: Edges

    def span(self, step: Step) -> int:
        """The number of the span that a step is in; 0 if in none."""
        return step.span if isinstance(step, Segment) else self.spans.get(step, 0)


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


def device_steps(given: StageItems) -> Mapping[Device, tuple[Step, ...]]:
    """What every device does in the forward of a stage: segments, and what communicates."""
    plan = given.plan
    builders: dict[Device, _Builder] = {}
    for item in given.items:
        if isinstance(item, Compute):
            builder = builders.setdefault(item.device, _Builder(given.stage))
            part = item.part
            groups = plan.recompute_group(part), plan.swap_group(part), given.span(item)
            builder.add(part, groups)
            continue
        for device in given.taking_part[item]:
            builder = builders.setdefault(device, _Builder(given.stage))
            builder.close()
            builder.steps.append(item)
    for builder in builders.values():
        builder.close()
    return {
        device: tuple(_marked(given, device, builder.steps)) for device, builder in builders.items()
    }


# --- who reads what a segment makes -------------------------------------------------------------

_Reads = Mapping[PTensor, Sequence[tuple[Step | None, rv.Box]]]
"""By tensor made on a device, who reads which box of it there; None stands for other stages."""


def _marked(given: StageItems, device: Device, steps: Sequence[Step]) -> Iterator[Step]:
    """The steps; each segment with what follows from who reads what it makes."""
    reads = _reads(given, device, steps)
    segments = [step for step in steps if isinstance(step, Segment)]
    on_device: dict[Op, list[Part]] = {}
    for part in (part for segment in segments for part in segment.parts):
        on_device.setdefault(part.op, []).append(part)
    for step in steps:
        if not isinstance(step, Segment):
            yield step
            continue
        has_backward, is_read_again = False, False
        for view in (view for part in step.parts for view in part.outputs):
            for reader, box in reads.get(view.tensor, ()):
                if reader is not step and box.intersect(view.box) is not None:
                    has_backward |= view.tensor.requires_grad
                    is_read_again |= reader is not None and given.span(reader) == step.span
        yield replace(
            step,
            has_backward=has_backward,
            is_left_out=step.span > 0 and step.recompute and not is_read_again,
            products=products_of(given.plan.graph, given.edges, step.parts, on_device),
        )


def _reads(given: StageItems, device: Device, steps: Sequence[Step]) -> _Reads:
    found: dict[PTensor, list[tuple[Step | None, rv.Box]]] = {}

    def leave(edge: Edge, reader: Step | None) -> None:
        # What an edge passes on comes from the edge before it.
        if device in edge.src.shards and edge.parent is None:
            found.setdefault(edge.tensor, []).append((reader, edge.src.shards[device].box))

    for step in steps:
        if isinstance(step, Segment):
            for part in step.parts:
                for position, view in enumerate(part.inputs):
                    if (part.op, position) not in given.edges.of_reader:
                        found.setdefault(view.tensor, []).append((step, view.box))
        elif isinstance(step, Move):
            leave(step.edge, step)
    for edge in given.edges.all:
        if edge.crosses and edge.src_stage == given.stage:
            leave(edge, None)
    loss = given.plan.graph.loss
    found.setdefault(loss, []).append((None, loss.box))
    return found
