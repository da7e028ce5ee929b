"""Held: names and sizes of the tensors that devices keep from forward to backward, for messages.

These are the tensors that autograd saves (``Op.saves``), inputs of segments, and their results.
Each storage counts once, because views share memory. ``footprint`` computes the total, including
tensors that live only while a stage runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import CONSTANT, INPUT, ITEM_BYTES, PARAMETER, PTensor, VTensor
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.event import actions_in
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment, Step
from superscaler_core.schedules import ActionKind, held_by

VIEWS = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "unsqueeze"),
        *("squeeze", "permute", "transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT"),
        *("movedim", "moveaxis", "expand", "expand_as", "slice", "narrow", "select", "unbind"),
        *("split", "split_with_sizes", "chunk", "tensor_split", "detach"),
    }
)
"""Kinds of ops whose output is a view of their input's memory.

A ``reshape`` may have to copy; after the transposes that models contain it rarely does.
"""

SAVED_ITEM_BYTES = {"dropout": 1}
"""Bytes per element of a saved mask with the shape of the output."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory on one device.

    Attributes:
        key: identifies it.
        name: name of the tensor that it was allocated for.
        num_bytes: its size.
    """

    key: Hashable
    name: str
    num_bytes: int


def tensors_in_flight(made: Materialized, device: Device) -> dict[str, int]:
    """Bytes by tensor, times the most microbatches that the device has in flight."""
    found: Counter[str] = Counter()
    for stage, count in in_flight(made, device).items():
        for storage in held_of(made, device, made.stages[stage].steps[device]):
            found[f"{storage.name} ({count} in flight)"] += storage.num_bytes * count
    return dict(found)


def in_flight(made: Materialized, device: Device) -> dict[int, int]:
    """For each stage, the most microbatches at a time between forward and backward."""
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for event in made.events_on[device]:
        for run in actions_in(event):
            now[run.stage] += held_by(run, ActionKind.RECOMPUTE in made.stage_kinds[run.stage])
            most[run.stage] = max(most[run.stage], now[run.stage])
    halves = made.plan.overlap.num_halves
    return {stage: count * halves for stage, count in most.items() if count}


def held_of(made: Materialized, device: Device, steps: Iterable[Step]) -> tuple[Storage, ...]:
    """The memory that one microbatch of a stage keeps on a device, without swapped values.

    Args:
        made: the plan.
        device: the device.
        steps: the device's steps in the stage's forward, as in ``StageProgram.steps``.
    """
    values = _Values(made, device)
    segments = [step for step in steps if isinstance(step, Segment)]
    owners = {part: segment for segment in segments for part in segment.parts}
    kept: dict[Storage, None] = {}
    for segment in segments:
        kept |= _wanted(values, segment, owners)
    return tuple(kept)


def _wanted(
    values: _Values, segment: Segment, owners: Mapping[Part, Segment]
) -> dict[Storage, None]:
    """The memory that stays on the device for the backward of a segment."""
    if segment.swap:
        return dict.fromkeys(values.arguments(segment, owners, without_grad=True))
    wanted = dict.fromkeys(values.arguments(segment, owners))
    return wanted if segment.recompute else wanted | dict.fromkeys(values.saved(segment))


class _Values:
    """The memory that holds each value on one device."""

    def __init__(self, made: Materialized, device: Device) -> None:
        self._made, self._device = made, device
        self._outputs: dict[tuple[Part, int], tuple[Storage, ...]] = {}
        self._leaving = self._leave()

    def _leave(self) -> frozenset[PTensor]:
        """The tensors that edges take from this device, and the results of the graph."""
        edges = self._made.edges.all
        taken = {e.tensor for e in edges if e.parent is None and self._device in e.src.shards}
        return frozenset({*taken, *self._made.plan.graph.ends})

    def arguments(
        self, segment: Segment, owners: Mapping[Part, Segment], *, without_grad: bool = False
    ) -> Iterable[Storage]:
        """The inputs of a segment, except weights and constants; all, or those without gradient."""
        for part in segment.parts:
            for position, view in enumerate(part.inputs):
                if without_grad and view.tensor.requires_grad:
                    continue
                writers = self._writers(part, position)
                for writer, output in writers:
                    if owners[writer] is not segment:
                        yield from self._output(writer, output)
                if not writers:
                    yield from self._operand(part, position)

    def saved(self, segment: Segment) -> Iterable[Storage]:
        """The tensors that autograd saves for a segment, and the segment's results."""
        for part in segment.parts:
            for number in part.op.saves:
                if number < len(part.inputs):
                    yield from self._operand(part, number)
                else:
                    yield from self._saved_output(part, number - len(part.inputs))
        for part in segment.parts:
            for i, view in enumerate(part.outputs):
                if view.tensor in self._leaving:
                    yield from self._output(part, i)

    def _saved_output(self, part: Part, position: int) -> tuple[Storage, ...]:
        item_bytes = SAVED_ITEM_BYTES.get(part.op.kind)
        if item_bytes is None:
            return self._output(part, position)
        view = part.outputs[position]
        size = view.box.num_elements * item_bytes
        return (Storage((part, position, "saved"), f"{view.tensor.name} (mask)", size),)

    def _output(self, part: Part, position: int) -> tuple[Storage, ...]:
        """The memory of a part's result; empty if it is a view of a weight."""
        key = part, position
        if key not in self._outputs:
            viewed = part.op.kind in VIEWS
            self._outputs[key] = (
                self._operand(part, 0) if viewed else (_made_for(part.outputs[position], key),)
            )
        return self._outputs[key]

    def _operand(self, part: Part, position: int) -> tuple[Storage, ...]:
        """The memory of a part's input; empty if it is a weight or a constant."""
        view = part.inputs[position]
        if view.tensor.kind in (PARAMETER, CONSTANT):
            return ()
        if view.tensor.kind == INPUT:
            return (_made_for(view, (view.tensor, view.box)),)
        edge = self._made.edges.of_reader.get((part.op, position))
        if edge is not None:
            return self._arrived(edge)
        return self._together(self._writers(part, position), view, (part, position, "sum"))

    def _arrived(self, edge: Edge) -> tuple[Storage, ...]:
        """The memory of an edge's result: the writer's memory if nothing moves."""
        shard = VTensor(edge.tensor, edge.dst.shards[self._device].box, ())
        if all(leg.is_idle for leg in edge.forward):
            if edge.parent is not None:
                return self._arrived(edge.parent)
            return self._together(self._writers_of(shard), shard, (edge.name, "edge"))
        return (_made_for(shard, (edge.name, "edge")),)

    def _together(
        self, writers: list[tuple[Part, int]], view: VTensor, key: Hashable
    ) -> tuple[Storage, ...]:
        """The memory of several parts' results: their sum, or one tensor from their pieces."""
        if len(writers) == 1:
            return self._output(*writers[0])
        return (_made_for(view, key),)

    def _writers(self, part: Part, position: int) -> list[tuple[Part, int]]:
        """The parts on this device that a part reads from, and which of their results."""
        view = part.inputs[position]
        if view.tensor not in self._made.plan.graph.producer:
            return []
        if (part.op, position) in self._made.edges.of_reader:
            return []
        return self._writers_of(view)

    def _writers_of(self, view: VTensor) -> list[tuple[Part, int]]:
        op = self._made.plan.graph.producer[view.tensor]
        output = op.outputs.index(view.tensor)
        parts = self._made.parts_on(op, self._device)
        if len(parts) == 1:
            return [(parts[0], output)]
        found: dict[VTensor, tuple[Part, int]] = {}
        for part in parts:
            if part.outputs[output].box.overlaps(view.box):
                found.setdefault(part.outputs[output], (part, output))
        return list(found.values())


def _made_for(view: VTensor, key: Hashable) -> Storage:
    size = view.box.num_elements * ITEM_BYTES[view.tensor.dtype]
    return Storage(key, view.tensor.name, size)
