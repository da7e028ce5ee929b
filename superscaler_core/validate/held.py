"""Held: the memory that a stage keeps on a device from a microbatch's forward to its backward.

That is what autograd saves (``Op.saves``), what segments are given, and what they pass on, each
piece of memory once: views share the memory of what they view. Attention and norms save a few
numbers a row besides (``1 / width`` of what is counted here).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass

from superscaler_core.codegen.segments import Segment, Step
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.side import Device
from superscaler_core.part import Part
from superscaler_core.tensor import CONSTANT, INPUT, ITEM_BYTES, PARAMETER, PTensor, VTensor

VIEWS = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "unsqueeze"),
        *("squeeze", "permute", "transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT"),
        *("movedim", "moveaxis", "expand", "expand_as", "slice", "narrow", "select", "unbind"),
        *("split", "split_with_sizes", "chunk", "tensor_split", "detach"),
    }
)
"""Kinds of ops whose output is another look at the memory of their input.

A ``reshape`` may have to copy; after the transposes that models write it seldom does.
"""

SAVED_ITEM_BYTES = {"dropout": 1}
"""Bytes an element of what is saved in the shape of the output, where that is a mask."""


@dataclass(frozen=True, slots=True)
class Storage:
    """A piece of memory on one device.

    Attributes:
        key: what tells it from others.
        name: of the tensor that it was made for.
        num_bytes: of it.
    """

    key: Hashable
    name: str
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Held:
    """What one microbatch holds of a stage on a device.

    Attributes:
        storages: from the forward to the backward; what is swapped is not there.
        again_bytes: more while the backward runs a forward again, or has fetched what was swapped
            for itself and for what runs backward next: the most of any segment.
    """

    storages: tuple[Storage, ...]
    again_bytes: int

    @property
    def num_bytes(self) -> int:
        """From the forward to the backward."""
        return sum(storage.num_bytes for storage in self.storages)


def held_of(made: Materialized, device: Device, steps: Iterable[Step]) -> Held:
    """What a stage holds.

    Args:
        made: the plan.
        device: where.
        steps: what the device does in the stage's forward, as ``codegen.stage_steps`` says.
    """
    values = _Values(made, device)
    segments = [step for step in steps if isinstance(step, Segment)]
    owners = {part: segment for segment in segments for part in segment.parts}
    kept: dict[Storage, None] = {}
    swapped: dict[Segment, dict[Storage, None]] = {}
    for segment in segments:
        wanted = _wanted(values, segment, owners)
        if segment.swap:
            stays = dict.fromkeys(values.arguments(segment, owners, without_grad=True))
            swapped[segment] = {s: None for s in wanted if s not in stays}
            wanted = {s: None for s in wanted if s in stays}
        kept |= wanted
    again = 0
    for before, segment in zip([None, *segments], segments, strict=False):
        fetched = swapped.get(segment, {})
        made_again = dict.fromkeys(values.saved(segment)) if segment.recompute else {}
        more = [s for s in made_again if s not in kept and s not in fetched]
        coming = swapped.get(before, {}) if before is not None else {}
        again = max(again, sum(s.num_bytes for s in (*more, *fetched, *coming)))
    return Held(tuple(kept), again)


def _wanted(
    values: _Values, segment: Segment, owners: Mapping[Part, Segment]
) -> dict[Storage, None]:
    """What the backward of a segment needs of its forward."""
    if segment.swap and not segment.recompute:
        return dict.fromkeys(values.saved_by_autograd(segment))
    wanted = dict.fromkeys(values.arguments(segment, owners))
    return wanted if segment.recompute else wanted | dict.fromkeys(values.saved(segment))


class _Values:
    """Which memory the values on one device are in."""

    def __init__(self, made: Materialized, device: Device) -> None:
        self._made, self._device = made, device
        self._outputs: dict[tuple[Part, int], tuple[Storage, ...]] = {}
        self._leaving = self._leave()

    def _leave(self) -> frozenset[PTensor]:
        """Tensors that edges take from here, and the loss."""
        edges = self._made.edges.all
        taken = {e.tensor for e in edges if e.parent is None and self._device in e.src.shards}
        return frozenset({*taken, self._made.plan.graph.loss})

    def arguments(
        self, segment: Segment, owners: Mapping[Part, Segment], *, without_grad: bool = False
    ) -> Iterable[Storage]:
        """What a segment is given, but for weights and constants; all, or what has no gradient."""
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
        """What autograd saves of a segment, and the results that leave it."""
        yield from self.saved_by_autograd(segment)
        for part in segment.parts:
            for i, view in enumerate(part.outputs):
                if view.tensor in self._leaving:
                    yield from self._output(part, i)

    def saved_by_autograd(self, segment: Segment) -> Iterable[Storage]:
        """What autograd saves of a segment."""
        for part in segment.parts:
            for number in part.op.saves:
                if number < len(part.inputs):
                    yield from self._operand(part, number)
                else:
                    yield from self._saved_output(part, number - len(part.inputs))

    def _saved_output(self, part: Part, position: int) -> tuple[Storage, ...]:
        item_bytes = SAVED_ITEM_BYTES.get(part.op.kind)
        if item_bytes is None:
            return self._output(part, position)
        view = part.outputs[position]
        size = view.box.num_elements * item_bytes
        return (Storage((part, position, "saved"), f"{view.tensor.name} (mask)", size),)

    def _output(self, part: Part, position: int) -> tuple[Storage, ...]:
        """The memory of a part's result; nothing if it is a view of a weight."""
        key = part, position
        if key not in self._outputs:
            viewed = part.op.kind in VIEWS
            self._outputs[key] = (
                self._operand(part, 0) if viewed else (_made_for(part.outputs[position], key),)
            )
        return self._outputs[key]

    def _operand(self, part: Part, position: int) -> tuple[Storage, ...]:
        """The memory of what a part reads; nothing if it is a weight or a constant."""
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
        """The memory of what an edge brought: that of what was written, if nothing moves."""
        shard = VTensor(edge.tensor, edge.dst.shards[self._device].box, ())
        if all(leg.is_idle for leg in edge.forward):
            if edge.parent is not None:
                return self._arrived(edge.parent)
            return self._together(self._writers_of(shard), shard, (edge.index, "edge"))
        return (_made_for(shard, (edge.index, "edge")),)

    def _together(
        self, writers: list[tuple[Part, int]], view: VTensor, key: Hashable
    ) -> tuple[Storage, ...]:
        """The memory of what several parts wrote: their sum, or one tensor from their pieces."""
        if len(writers) == 1:
            return self._output(*writers[0])
        return (_made_for(view, key),)

    def _writers(self, part: Part, position: int) -> list[tuple[Part, int]]:
        """The parts here from which a part reads directly, and which of their results."""
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
            if part.outputs[output].box.intersect(view.box) is not None:
                found.setdefault(part.outputs[output], (part, output))
        return list(found.values())


def _made_for(view: VTensor, key: Hashable) -> Storage:
    size = view.box.num_elements * ITEM_BYTES[view.tensor.dtype]
    return Storage(key, view.tensor.name, size)
