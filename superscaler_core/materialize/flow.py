"""Flow: the values that the segments and edges of a stage pass to each other on one device."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby

import rvdcomm as rv
from superscaler_core.graph.graph import Op
from superscaler_core.graph.once import known_of
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import CONSTANT, INPUT, PARAMETER, PTensor, VTensor
from superscaler_core.materialize.edges import Edge, Edges
from superscaler_core.materialize.segments import Segment, Step
from superscaler_core.materialize.sequence import MoveStep
from superscaler_core.materialize.weights import Use, Weights
from superscaler_core.plan import Device, Plan
from superscaler_core.plan.op_split import parts_by_device
from superscaler_core.program.value import IN_BLOCK, Role, Value

MAX_RESULTS = 1 << 16
"""Bound on cached results of parts of a graph."""


@dataclass(frozen=True, slots=True)
class Held:
    """What a value is on one device.

    Attributes:
        value: the value.
        tensor: the graph's tensor of which it is a part.
        box: the part.
        has_grad: whether its gradient is needed where it is passed.
    """

    value: Value
    tensor: PTensor
    box: rv.Box
    has_grad: bool = False


class Sources:
    """Where parts read their inputs: which values of their own device.

    Args:
        plan, edges, weights: the plan with its communication.
    """

    def __init__(self, plan: Plan, edges: Edges, weights: Weights) -> None:
        self.plan, self.edges, self.weights = plan, edges, weights
        self._read: dict[tuple[Part, int], tuple[Held, ...]] = {}
        self._boxes: dict[Device, dict[PTensor, dict[rv.Box, Value]]] = {}
        self._results = known_of(plan.graph, "results of parts", MAX_RESULTS)

    def parts_on(self, op: Op, device: Device) -> tuple[Part, ...]:
        """The parts of an op that run on a device."""
        return parts_by_device(op, self.plan.op_split(op)).get(device, ())

    def result(self, part: Part, position: int, device: Device) -> Held:
        """One result of a part."""
        parts = self.parts_on(part.op, device)
        number = parts.index(part) if len(parts) > 1 else 0
        found: Held = self._results.of(
            (part, position, number), partial(_result, part, position, number)
        )
        return found

    def arrived(self, edge: Edge, device: Device) -> Held:
        """What an edge brings to a device."""
        box = edge.dst.shards[device].box
        return Held(Value(Role.ARRIVED, edge.name), edge.tensor, box, edge.has_grad)

    def read(self, part: Part, position: int, device: Device) -> tuple[Held, ...]:
        """The values whose sum, in the box of the input, a part reads as an input."""
        key = part, position
        if key not in self._read:
            self._read[key] = self._find(part, position, device)
        return self._read[key]

    def _find(self, part: Part, position: int, device: Device) -> tuple[Held, ...]:
        view, edge = part.inputs[position], self.edges.of_reader.get((part.op, position))
        tensor = view.tensor
        if edge is not None:
            return (self.arrived(edge, device),)
        if tensor.kind == INPUT:
            return (Held(self._input(tensor, view.box, device), tensor, view.box),)
        if tensor.kind == CONSTANT:
            role = Role.STATE if tensor in self.plan.graph.state else Role.CONSTANT
            return (Held(Value(role, tensor.name), tensor, tensor.box),)
        if tensor.kind == PARAMETER:
            use = self.weights.of_reader[part.op, position]
            return (Held(copy_of(use), tensor, use.sharding.shards[device].box),)
        return self.writers(view, device)

    def _input(self, tensor: PTensor, box: rv.Box, device: Device) -> Value:
        """A box of the batch; boxes of one input are numbered on each device."""
        known = self._boxes.setdefault(device, {}).setdefault(tensor, {})
        if box not in known:
            name = tensor.name + (f"#{len(known)}" if known else "")
            known[box] = Value(Role.INPUT, name)
        return known[box]

    def boxes_on(self, device: Device) -> dict[str, tuple[str, str]]:
        """The boxes of the batch that a device reads: by value, the input and the box as text."""
        return {
            value.name: (tensor.name, str(box))
            for tensor, boxes in self._boxes.get(device, {}).items()
            for box, value in boxes.items()
        }  # fmt: skip

    def inputs_of(self, part: Part, device: Device) -> tuple[Value, ...]:
        """The boxes of the batch that a part reads, in order."""
        forms = enumerate(part.op.form.inputs)
        given = [position for position, form in forms if form.kind == INPUT]
        return tuple(held.value for i in given for held in self.read(part, i, device))

    def writers(self, view: VTensor, device: Device) -> tuple[Held, ...]:
        """The results of parts on a device that form a view, each summand of it once."""
        op = self.plan.graph.producer[view.tensor]
        position = op.outputs.index(view.tensor)
        found: dict[VTensor, Held] = {}
        for part in self.parts_on(op, device):
            out = part.outputs[position]
            if out.box.overlaps(view.box) and out not in found:
                found[out] = self.result(part, position, device)
        return tuple(found.values())

    def sent(self, edge: Edge, device: Device) -> tuple[Held, ...]:
        """The values that a device writes to an edge."""
        if edge.parent is not None:
            return (self.arrived(edge.parent, device),)
        return self.writers(VTensor(edge.tensor, edge.src.shards[device].box, ()), device)


def _result(part: Part, position: int, number: int) -> Held:
    """One result of a part, with the part's number among those of its op on a device."""
    view = part.outputs[position]
    name = view.tensor.name + (f"#{number}" if number else "")
    return Held(Value(Role.RESULT, name), view.tensor, view.box, view.tensor.requires_grad)


def copy_of(use: Use) -> Value:
    """The copy of a weight that segments read."""
    return Value(Role.COPY if use.is_fetched or use.is_brought else Role.WEIGHT, use.name)


@dataclass(frozen=True)
class Signature:
    """What a segment reads and makes.

    Attributes:
        inputs: values with gradients.
        others: values without gradients, constants and weights.
        results: values that others read, that edges move, losses, and values of buffers; those with
            gradients come first.
        losses: the losses among the results.
        states: the buffers that the segment replaces, each with the result that is its new value.
        trained: the uses of weights to which its backward adds gradients, by name.
    """

    inputs: tuple[Held, ...]
    others: tuple[Held, ...]
    results: tuple[Held, ...]
    losses: tuple[Value, ...]
    states: Mapping[str, Value]
    trained: tuple[str, ...]

    @property
    def args(self) -> tuple[Held, ...]:
        """All arguments, in the order of its function."""
        return self.inputs + self.others


class DeviceFlow:
    """The inputs and results of every step of a stage on one device.

    Args:
        sources: where parts read.
        device: the device.
        steps: its steps in the forward.
        region: the number of the region that contains a step; 0 if none.
        leaving, arriving: the edges from the stage to others, and from others to it, in order.

    Attributes:
        leaving, arriving: those that the device writes, or reads.
        sent: for each edge that the device writes, the values that it writes.
        of: the signature of each segment, by its name.
        summands: for each summand of a sum that an edge moves, the edges that move the sum.
        grads: for each value with gradient, what its readers add to the gradient.
        regions: the steps of each region that is recomputed, by its number.
    """

    def __init__(
        self,
        sources: Sources,
        device: Device,
        steps: Sequence[Step],
        region: Callable[[Step], int],
        leaving: Iterable[Edge],
        arriving: Iterable[Edge],
    ) -> None:
        self._sources, self._device, self._region = sources, device, region
        self.segments = [step for step in steps if isinstance(step, Segment)]
        inside = [step.edge for step in steps if isinstance(step, MoveStep)]
        self._inside = [e for e in inside if device in e.dst.shards]
        self.leaving = tuple(e for e in leaving if device in e.src.shards)
        self.arriving = tuple(e for e in arriving if device in e.dst.shards)
        from_here = [e for e in inside if device in e.src.shards]
        self._maker = {
            held.value: segment for segment in self.segments for held in self._made_in(segment)
        }
        self._reads = {segment: self._read_by(segment) for segment in self.segments}
        self.sent = {e: sources.sent(e, device) for e in (*from_here, *self.leaving)}
        self.of = self._signatures()
        self.summands = self._find_summands()
        self.regions = {n: tuple(run) for n, run in groupby(steps, region) if n}

    def form_on(self, device: Device) -> Hashable:
        """A key that is equal for alike devices whose functions of the stage have the same text.

        Args:
            device: this device, or one that does the same with its own parts.
        """
        sent = tuple(
            self._within(edge.src.shards[device].box, held, device)
            for edge, mine in self.sent.items() for held in mine
        )  # fmt: skip
        return sent, tuple(
            (form.call, *(
                self._within(form.inputs[i][0], held, device, part.op, i)
                for i in range(len(form.inputs)) for held in self.read(part, i)
            ))
            for segment in self.segments for part in segment.parts
            for form in [self._own(part, device).form]
        )  # fmt: skip

    def _own(self, part: Part, device: Device) -> Part:
        """The part of an op on a device that does the same."""
        return part if device == self._device else self._sources.parts_on(part.op, device)[0]

    def _within(
        self, box: rv.Box, held: Held, device: Device, op: Op | None = None, position: int = 0
    ) -> Hashable:
        """Where a box on a device lies in what a value holds there of its tensor.

        ``op`` is the op that reads the box as its input ``position``; None for an edge.
        """
        there = self._box_on(held, device, op, position)
        if there is None or box == there:
            return None
        lo = tuple(a - b for a, b in zip(box.lo, there.lo, strict=True))
        hi = tuple(a - b for a, b in zip(box.hi, there.lo, strict=True))
        return lo, hi, there.shape

    def _box_on(self, held: Held, device: Device, op: Op | None, position: int) -> rv.Box | None:
        """What a value holds of its tensor on a device; None for just what is read."""
        sources, value = self._sources, held.value
        if device == self._device:
            return held.box
        match value.role:
            case Role.RESULT:
                maker = sources.plan.graph.producer[held.tensor]
                form = sources.parts_on(maker, device)[0].form
                return form.outputs[maker.outputs.index(held.tensor)][0]
            case Role.ARRIVED:
                edge = self._edge_of[value.name]
                return edge.dst.shards[device].box
            case Role.WEIGHT | Role.COPY if op is not None:
                return sources.weights.of_reader[op, position].sharding.shards[device].box
            case Role.INPUT:
                return None
        return held.box

    @cached_property
    def _edge_of(self) -> Mapping[str, Edge]:
        edges = self._sources.edges.all
        return {edge.name: edge for edge in edges if self._device in edge.dst.shards}

    @property
    def all(self) -> Iterator[Held]:
        """All values: the results of segments, what segments read, and what edges forward."""
        for segment in self.segments:
            yield from self._made_in(segment)
        for reads in self._reads.values():
            yield from reads
        for sent in self.sent.values():
            yield from sent

    # --- segments -------------------------------------------------------------------------------

    def read(self, part: Part, position: int) -> tuple[Held, ...]:
        """The values whose sum, in the box of the input, a part reads as an input."""
        return self._sources.read(part, position, self._device)

    def result(self, part: Part, position: int) -> Held:
        """One result of a part."""
        return self._sources.result(part, position, self._device)

    def arrived(self, edge: Edge) -> Held:
        """What an edge brings."""
        return self._sources.arrived(edge, self._device)

    def _made_in(self, segment: Segment) -> Iterator[Held]:
        for part in segment.parts:
            for position in range(len(part.outputs)):
                yield self.result(part, position)

    def _read_by(self, segment: Segment) -> tuple[Held, ...]:
        """The values that a segment reads and does not compute itself."""
        found: dict[Value, Held] = {}
        for part in segment.parts:
            for position in range(len(part.inputs)):
                for held in self.read(part, position):
                    if self._maker.get(held.value) is not segment:
                        found[held.value] = held
        return tuple(found.values())

    def _signatures(self) -> Mapping[str, Signature]:
        wanted = {held.value for read in self._reads.values() for held in read}
        wanted |= {held.value for sent in self.sent.values() for held in sent}
        return {segment.name: self._signature(segment, wanted) for segment in self.segments}

    def _signature(self, segment: Segment, wanted: set[Value]) -> Signature:
        read = self._reads[segment]
        losses, states = self._ends(segment)
        mine = wanted.union(losses, states.values())
        results = [held for held in self._made_in(segment) if held.value in mine]
        return Signature(
            tuple(held for held in read if held.has_grad),
            tuple(held for held in read if not held.has_grad),
            tuple(sorted(results, key=lambda held: not held.has_grad)),
            losses,
            states,
            self._trained(segment),
        )

    def _ends(self, segment: Segment) -> tuple[tuple[Value, ...], Mapping[str, Value]]:
        """The losses that a segment computes, and the new values of buffers by the buffers."""
        graph, losses, states = self._sources.plan.graph, [], {}
        buffers = {kept: buffer for buffer, kept in graph.state.items()}
        for part in segment.parts:
            first = part.op.outputs[0]
            if first in graph.losses:
                losses.append(self.result(part, 0).value)
            elif first in buffers:
                kept = self.result(part, 0).value
                states[buffers[first].name] = kept
        return tuple(losses), states

    @cached_property
    def trained(self) -> frozenset[str]:
        """The uses of weights that get gradients from any segment."""
        return frozenset(name for mine in self.of.values() for name in mine.trained)

    def _trained(self, segment: Segment) -> tuple[str, ...]:
        """The uses of weights that get gradients from a segment."""
        of_reader = self._sources.weights.of_reader
        uses = (
            of_reader[part.op, position]
            for part in segment.parts if segment.has_backward
            for position in part.op.form.trained
        )  # fmt: skip
        return tuple(dict.fromkeys(use.name for use in uses if use.is_trained))

    # --- edges ----------------------------------------------------------------------------------

    def packed(self, edge: Edge, again: int = 0) -> tuple[Value, ...]:
        """The values that the device writes to an edge, if any, or the partial sum of them.

        Args:
            edge: the edge.
            again: the region that is recomputed; 0 in a forward.
        """
        sent = tuple(held.value for held in self.sent.get(edge, ()))
        return (partial_of(edge),) if sent and edge in self.sums(sent[0], again) else sent

    def sums(self, value: Value, again: int = 0) -> tuple[Edge, ...]:
        """The edges to whose partial sums a result is added when it is made.

        A recompute makes the partial sum only if it makes all summands; others read them one by
        one.
        """
        edges = self.summands.get(value, ())
        return tuple(edge for edge in edges if not again or self.is_summed_in(edge, again))

    def _find_summands(self) -> Mapping[Value, tuple[Edge, ...]]:
        found: dict[Value, tuple[Edge, ...]] = {}
        for edge, sent in self.sent.items():
            box = edge.src.shards[self._device].box
            if len(sent) > 1 and all(held.box == box for held in sent):
                for held in sent:
                    found[held.value] = (*found.get(held.value, ()), edge)
        return found

    @cached_property
    def grads(self) -> Mapping[Value, tuple[Value, ...]]:
        """For each value with gradient, what its readers add to the gradient."""
        found: dict[Value, tuple[Value, ...]] = {}

        def add(value: Value, reader: str) -> None:
            found[value] = (*found.get(value, ()), grad_of(value, reader))

        for segment in self.segments:
            for held in self.of[segment.name].inputs if segment.has_backward else ():
                add(held.value, segment.name)
        for edge, sent in self.sent.items():
            for held in sent if edge.backward else ():
                add(held.value, edge.name)
        return found

    # --- regions that are recomputed
    # -------------------------------------------------------------------

    def entering(self, region: int) -> tuple[Held, ...]:
        """The values that the steps of a region read and none of them computes."""
        read: dict[Value, Held] = {}
        made: set[Value] = set()
        for step in self.regions.get(region, ()):
            if isinstance(step, Segment):
                mine = self.of[step.name]
                passed = (held for held in mine.others if held.value.role in IN_BLOCK)
                read |= {held.value: held for held in (*mine.inputs, *passed)}
                made |= {held.value for held in mine.results}
            elif isinstance(step, MoveStep):
                read |= {held.value: held for held in self.sent.get(step.edge, ())}
                if self._device in step.edge.dst.shards:
                    made.add(self.arrived(step.edge).value)
        return tuple(held for value, held in read.items() if value not in made)

    def is_summed_in(self, edge: Edge, region: int) -> bool:
        """Whether an edge and all summands that it moves are in a region."""
        makers = (self._maker[held.value] for held in self.sent[edge])
        return self._region(MoveStep(edge)) == region and all(
            maker.region == region for maker in makers
        )


def partial_of(edge: Edge) -> Value:
    """The sum of several results of a device that an edge moves."""
    return Value(Role.PARTIAL, edge.name)


def grad_of(value: Value, reader: str) -> Value:
    """What the backward of a reader, a segment or an edge, adds to the gradient of a value."""
    return Value(Role.GRAD, f"{value} by {reader}")
