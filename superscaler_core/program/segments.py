"""Segments: sequences of parts on one device without communication in between."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import rvdcomm as rv
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PTensor
from superscaler_core.plan import Device, Plan
from superscaler_core.program.bias import products_of
from superscaler_core.program.edges import Edge, Edges
from superscaler_core.program.sequence import Compute, Item, Move
from superscaler_core.schedules import ActionKind


@dataclass(frozen=True, eq=False)
class Segment:
    """Parts that run as one generated function.

    Attributes:
        name: name of the function.
        parts: the parts, in order.
        recompute: whether its backward recomputes its forward.
        swap: whether the values that it keeps for its backward wait on the host.
        span: number of the group with which it is rerun as a whole; 0 if none.
        has_backward: whether any of its results has a gradient.
        is_left_out: whether the rerun of its span leaves it out, because its own backward
            recomputes it and nothing else in the span reads its results.
        products: bias additions done by a product among the parts (see ``products_of``).
    """

    name: str
    parts: tuple[Part, ...]
    recompute: bool
    swap: bool = False
    span: int = 0
    has_backward: bool = False
    is_left_out: bool = False
    products: Mapping[Part, Part] = field(default_factory=dict)

    @cached_property
    def has_weights(self) -> bool:
        """Whether the segment reads a trained weight."""
        return any(part.op.form.trained for part in self.parts)

    @cached_property
    def ops(self) -> tuple[Op, ...]:
        """The ops of the parts, in order."""
        return tuple(part.op for part in self.parts)


Step = Segment | Item


@dataclass(frozen=True)
class StageItems:
    """The forward of a stage, with everything that decides its order.

    Attributes:
        plan: the decisions.
        stage: the number of the stage.
        items: the items of the forward, in one order for all devices.
        spans: by item, the group with which it is rerun as a whole.
        taking_part: by item that communicates, the devices that take part.
        edges: the edges of the plan.
        ends: ops before which segments end although there is no communication.
        kinds: the kinds of actions that the schedule has for the stage.
    """

    plan: Plan
    stage: int
    items: Sequence[Item]
    spans: Mapping[Item, int]
    taking_part: Mapping[Step, Sequence[Device]]
    edges: Edges
    ends: Collection[Op] = ()
    kinds: frozenset[ActionKind] = frozenset({ActionKind.FORWARD, ActionKind.BACKWARD})

    def span(self, step: Step) -> int:
        """The number of the span that contains a step; 0 if none."""
        if isinstance(step, Segment):
            return step.span
        return self.spans.get(step, 0) if self.spans else 0

    def group(self, item: Compute) -> tuple[int, int, int]:
        """The numbers of the groups with which a part is recomputed, swapped, and rerun."""
        plan, part = self.plan, item.part
        if not self._has_groups:
            return 0, 0, 0
        return plan.recompute_group(part), plan.swap_group(part), self.span(item)

    @cached_property
    def _has_groups(self) -> bool:
        return bool(self.spans) or self.plan.has_groups

    @cached_property
    def read_outside(self) -> frozenset[PTensor]:
        """Results of these items that other items of the stage read; empty if there are none."""
        ops = {item.part.op for item in self.items if isinstance(item, Compute)}
        moved = {item.edge for item in self.items if isinstance(item, Move)}
        readers, of_reader = self.plan.graph.readers, self.edges.of_reader
        direct = {
            tensor
            for op in ops
            for tensor in op.outputs
            for reader in readers.get(tensor, ())
            if reader[0] not in ops and reader not in of_reader
        }
        made = {tensor for op in ops for tensor in op.outputs}
        edges = (edge for edge in self.edges.of_stage(self.stage) if edge not in moved)
        return frozenset(direct | ({edge.tensor for edge in edges} & made))


@dataclass
class _Builder:
    """The steps of one device so far, and the parts of the segment that is still open."""

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

    def is_at(self, op: Op) -> bool:
        """Whether the last part is of the same op."""
        return bool(self.parts) and self.parts[-1].op == op

    def close(self) -> None:
        if not self.parts:
            return
        name = f"stage{self.stage}_segment{self.num_segments}"
        recompute, swap, span = self.group
        self.steps.append(Segment(name, tuple(self.parts), recompute > 0, swap > 0, span))
        self.parts, self.num_segments = [], self.num_segments + 1


def device_steps(given: StageItems) -> Mapping[Device, tuple[Step, ...]]:
    """The steps of each device in the forward of a stage: segments and communication."""
    builders: dict[Device, _Builder] = {}
    for item in given.items:
        if isinstance(item, Compute):
            builder = builders.setdefault(item.device, _Builder(given.stage))
            part = item.part
            if part.op in given.ends and not builder.is_at(part.op):
                builder.close()
            builder.add(part, given.group(item))
            continue
        for device in given.taking_part[item]:
            builder = builders.setdefault(device, _Builder(given.stage))
            builder.close()
            builder.steps.append(item)
    for builder in builders.values():
        builder.close()
    known: dict[Hashable, Sequence[_Marks]] = {}
    found = {}
    for device, builder in builders.items():
        steps = builder.steps
        sequence = sequence_of(steps)
        marks = known.get(sequence) if sequence else None
        if marks is None:
            marks = tuple(_marks(given, device, steps))
            known[sequence] = marks
        found[device] = tuple(_marked(given, steps, marks))
    return found


def sequence_of(steps: Sequence[Step]) -> Hashable:
    """A key, equal for devices whose segments have the same ops, with one part of each op.

    None for a device with several parts of an op. With one part per op, which part it is does not
    change which segment reads which result, so equal keys have equal readers.
    """
    ops = [part.op for step in steps if isinstance(step, Segment) for part in step.parts]
    if len(set(ops)) < len(ops):
        return None
    return tuple(
        (step.recompute, step.swap, step.span, tuple(part.op for part in step.parts))
        if isinstance(step, Segment)
        else step
        for step in steps
    )


# --- who reads what a segment makes -------------------------------------------------------------

_Reads = Mapping[PTensor, Sequence[tuple[Step | None, rv.Box]]]
"""For each tensor made on a device, the readers of its boxes there; None is another stage."""


_Marks = tuple[bool, bool]
"""Whether a segment has a backward, and whether its span's rerun leaves it out."""


def _marked(given: StageItems, steps: Sequence[Step], marks: Sequence[_Marks]) -> Iterator[Step]:
    """The steps; each segment gets its marks, and the bias additions that its products do."""
    left = iter(marks)
    on_device: dict[Op, list[Part]] = {}
    for part in (part for step in steps if isinstance(step, Segment) for part in step.parts):
        on_device.setdefault(part.op, []).append(part)
    for step in steps:
        if not isinstance(step, Segment):
            yield step
            continue
        products = products_of(given.plan.graph, given.edges, step.parts, on_device)
        yield Segment(
            step.name, step.parts, step.recompute, step.swap, step.span, *next(left), products
        )


def _marks(given: StageItems, device: Device, steps: Sequence[Step]) -> Iterator[_Marks]:
    """The marks of each segment, which follow from the readers of its results."""
    reads = _reads(given, device, steps)
    for step in steps:
        if not isinstance(step, Segment):
            continue
        has_backward, is_read_again = False, False
        for part in step.parts:
            for tensor, (made, _) in zip(part.op.outputs, part.form.outputs, strict=True):
                for reader, box in reads.get(tensor, ()):
                    if reader is not step and box.overlaps(made):
                        has_backward |= tensor.requires_grad
                        is_read_again |= reader is not None and given.span(reader) == step.span
        yield has_backward, step.span > 0 and step.recompute and not is_read_again


def _reads(given: StageItems, device: Device, steps: Sequence[Step]) -> _Reads:
    found: dict[PTensor, list[tuple[Step | None, rv.Box]]] = {}

    def leave(edge: Edge, reader: Step | None) -> None:
        # An edge with a parent forwards the result of that parent, not of a segment here.
        if device in edge.src.shards and edge.parent is None:
            found.setdefault(edge.tensor, []).append((reader, edge.src.shards[device].box))

    for step in steps:
        if isinstance(step, Segment):
            for part in step.parts:
                boxes = part.form.inputs
                for position, tensor in given.edges.read_directly(part.op):
                    found.setdefault(tensor, []).append((step, boxes[position][0]))
        elif isinstance(step, Move):
            leave(step.edge, step)
    for edge in given.edges.leaving(given.stage):
        leave(edge, None)
    for tensor in (*given.read_outside, *given.plan.graph.ends):
        found.setdefault(tensor, []).append((None, tensor.box))
    return found
