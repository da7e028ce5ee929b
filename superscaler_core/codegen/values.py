"""Values: what the variables of a generated file hold, and where each comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import rvdcomm as rv
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.statement import Expression
from superscaler_core.codegen.text import index_text
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import CONSTANT, INPUT, PARAMETER, VTensor
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.materialized import Materialized
from superscaler_core.quoted import quoted


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that stage functions and segments pass to each other.

    Attributes:
        name: name of its variable.
        box: the box of the graph's tensor that it holds.
        has_grad: whether its gradient is needed where it is passed.
        text: the expression for it in a stage function.
    """

    name: str
    box: rv.Box
    has_grad: bool
    text: str


class Values:
    """The values of one device.

    Args:
        made: the plan.
        device: the device.
        names: the names of the device's file.
        mb: the expression of the microbatch's number.
    """

    def __init__(self, made: Materialized, device: Device, names: Names, mb: str) -> None:
        self._made, self._device, self._names, self._mb = made, device, names, mb
        self._sources: dict[tuple[Part, int], list[Value]] = {}

    def of_part(self, part: Part, position: int) -> Value:
        """One result of a part."""
        view = part.outputs[position]
        name = self._names.of((part, position), view.tensor.name)
        return Value(name, view.box, view.tensor.requires_grad, name)

    def of_edge(self, edge: Edge) -> Value:
        """The value that an edge brings to this device."""
        name = self._names.of(edge, f"{edge.tensor.name}_{edge.name}")
        box = edge.dst.shards[self._device].box
        return Value(name, box, edge.has_grad, name)

    def source(self, part: Part, position: int) -> list[Value]:
        """The values whose sum, in the box of the input, a part reads as an input."""
        key = part, position
        if key not in self._sources:
            self._sources[key] = self._find_source(part, position)
        return self._sources[key]

    def _find_source(self, part: Part, position: int) -> list[Value]:
        view = part.inputs[position]
        tensor = view.tensor
        edge = self._made.edges.of_reader.get((part.op, position))
        if edge is not None:
            return [self.of_edge(edge)]
        if tensor.kind == INPUT:
            name = self._names.of((tensor, view.box), tensor.name)
            text = f'run.input({quoted(tensor.name)}, {self._mb}, "{view.box}")'
            return [Value(name, view.box, False, text)]
        if tensor.kind == CONSTANT:
            name = self._names.of(tensor, tensor.name)
            changes = tensor in self._made.plan.graph.state
            key = quoted(tensor.name)
            call = f"state({key}, {self._mb})" if changes else f"constant({key})"
            return [Value(name, tensor.box, False, f"run.{call}")]
        if tensor.kind == PARAMETER:
            use = self._made.weights.of_reader[part.op, position]
            name, box = self._names.of(use, tensor.name), use.side.shards[self._device].box
            return [Value(name, box, False, f"run.use({quoted(use.name)})")]
        return self.writers(view)

    def writers(self, view: VTensor) -> list[Value]:
        """The results of parts on this device that form a view, each summand of it once."""
        op = self._made.plan.graph.producer[view.tensor]
        position = op.outputs.index(view.tensor)
        found: dict[VTensor, Value] = {}
        for part in self._made.parts_on(op, self._device):
            out = part.outputs[position]
            if out.box.overlaps(view.box):
                found.setdefault(out, self.of_part(part, position))
        return list(found.values())

    def edge_source(self, edge: Edge) -> list[Value]:
        """The values that this device writes to an edge."""
        if edge.parent is not None:
            return [self.of_edge(edge.parent)]
        view = VTensor(edge.tensor, edge.src.shards[self._device].box, ())
        return self.writers(view)


def combined(box: rv.Box, sources: Sequence[Value]) -> Expression:
    """The sum, in ``box``, of values that each hold a part of it."""
    names = tuple(value.name for value in sources)
    if len(sources) == 1:
        return Expression(names[0] + index_text(box, sources[0].box), names)
    if all(value.box.contains(box) for value in sources):
        terms = " + ".join(v.name + index_text(box, v.box) for v in sources)
        return Expression(f"({terms})", names)
    pieces = ", ".join(f'({v.name}, "{v.box}")' for v in sources)
    return Expression(f'ops.join("{box}", [{pieces}])', names)
