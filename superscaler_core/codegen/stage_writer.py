"""StageWriter: the functions of one stage on one device, as Python text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill

import rvdcomm as rv
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segments import Segment, Step
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sequence import Close, Move, Open
from superscaler_core.materialize.side import Device
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.part import Part
from superscaler_core.tensor import CONSTANT, INPUT, PARAMETER, VTensor

_TAKE_BIAS = ("F.linear(", "F.conv1d(", "F.conv2d(", "F.conv3d(")
"""Code of products that take a bias as the keyword of that name."""

INDENT = "    "
WIDTH = 100


@dataclass(frozen=True, slots=True)
class Value:
    """Something that stage functions and segments pass to each other.

    Attributes:
        name: of the variable.
        box: what it holds of its tensor.
        has_grad: whether its gradient is asked for where it is passed.
        text: how a stage function writes it.
    """

    name: str
    box: rv.Box
    has_grad: bool
    text: str


class StageWriter:
    """Writes what one device does in one stage.

    Args:
        made: the plan.
        stage, device: which.
        steps: what the device does in the stage's forward.
        names: of the device's file.
    """

    def __init__(
        self,
        made: Materialized,
        stage: int,
        device: Device,
        steps: Sequence[Step],
        names: Names,
    ) -> None:
        self._made, self._stage, self._device, self._steps = made, stage, device, steps
        self._names = names
        self._grads: dict[str, list[str]] = {}
        self._sources: dict[tuple[Part, int], list[Value]] = {}
        self._segments = [step for step in steps if isinstance(step, Segment)]
        self._maker = {
            self._part_value(part, i).name: segment
            for segment in self._segments
            for part in segment.parts
            for i in range(len(part.outputs))
        }
        self._exports = self._find_exports()
        self._args = {segment: self._args_of(segment) for segment in self._segments}

    # --- what the file gets ---------------------------------------------------------------------

    def functions(self) -> list[str]:
        """Segments, then the stage's forward and backward."""
        texts = [self._segment(segment) for segment in self._segments]
        return [*texts, self._forward(), self._backward()]

    @property
    def recomputed(self) -> list[str]:
        """Segments whose backward runs their forward again."""
        return [segment.name for segment in self._segments if segment.recompute]

    # --- values ---------------------------------------------------------------------------------

    def _part_value(self, part: Part, position: int) -> Value:
        view = part.outputs[position]
        name = self._names.of((part, position), view.tensor.name)
        return Value(name, view.box, view.tensor.requires_grad, name)

    def _edge_value(self, edge: Edge) -> Value:
        name = self._names.of(edge, f"{edge.tensor.name}_{edge.name}")
        box = edge.dst.shards[self._device].box
        return Value(name, box, edge.tensor.requires_grad, name)

    def _source(self, part: Part, position: int) -> list[Value]:
        """The values whose sum, in its box, a part takes as an input."""
        key = part, position
        if key not in self._sources:
            self._sources[key] = self._find_source(part, position)
        return self._sources[key]

    def _find_source(self, part: Part, position: int) -> list[Value]:
        view = part.inputs[position]
        tensor = view.tensor
        if tensor.kind == INPUT:
            name = self._names.of((tensor, view.box), tensor.name)
            text = f'run.input("{tensor.name}", mb, "{view.box}")'
            return [Value(name, view.box, False, text)]
        if tensor.kind == CONSTANT:
            name = self._names.of(tensor, tensor.name)
            return [Value(name, tensor.box, False, f'run.constant("{tensor.name}")')]
        if tensor.kind == PARAMETER:
            use = self._made.weights.of_reader[part.op, position]
            name, box = self._names.of(use, tensor.name), use.side.shards[self._device].box
            return [Value(name, box, False, f'run.use("{use.name}")')]
        edge = self._made.edges.of_reader.get((part.op, position))
        return [self._edge_value(edge)] if edge is not None else self._writers(view)

    def _writers(self, view: VTensor) -> list[Value]:
        """The outputs of parts on this device that a view is made of, each summand of it once."""
        op = self._made.plan.graph.producer[view.tensor]
        position = op.outputs.index(view.tensor)
        found: dict[VTensor, Value] = {}
        for part in self._made.parts_on(op, self._device):
            out = part.outputs[position]
            if out.box.intersect(view.box) is not None:
                found.setdefault(out, self._part_value(part, position))
        return list(found.values())

    # --- segments -------------------------------------------------------------------------------

    def _args_of(self, segment: Segment) -> tuple[list[Value], list[Value]]:
        """What a segment is given: values that have gradients, and others."""
        found = {
            value.name: value
            for part in segment.parts
            for position in range(len(part.inputs))
            for value in self._source(part, position)
            if self._maker.get(value.name) is not segment
        }
        values = list(found.values())
        return [v for v in values if v.has_grad], [v for v in values if not v.has_grad]

    def _find_exports(self) -> dict[Segment, list[Value]]:
        """What each segment returns: what others read, what edges take away, the loss."""
        wanted = {
            value.name
            for segment in self._segments
            for part in segment.parts
            for position in range(len(part.inputs))
            for value in self._source(part, position)
            if self._maker.get(value.name) is not segment
        }
        for edge in self._edges_from_here():
            wanted |= {value.name for value in self._edge_source(edge)}
        found: dict[Segment, list[Value]] = {}
        for segment in self._segments:
            wanted.update(self._loss_names(segment))
            outs = [
                self._part_value(part, i)
                for part in segment.parts
                for i in range(len(part.outputs))
            ]
            chosen = [value for value in outs if value.name in wanted]
            found[segment] = sorted(chosen, key=lambda value: not value.has_grad)
        return found

    def _loss_names(self, segment: Segment) -> list[str]:
        loss = self._made.plan.graph.loss
        return [
            self._part_value(part, 0).name for part in segment.parts if part.op.outputs[0] == loss
        ]

    def _segment(self, segment: Segment) -> str:
        with_grad, others = self._args[segment]
        args = ["rng", *(value.name for value in [*with_grad, *others])]
        lines = [wrapped(f"def {segment.name}(", args, "):")]
        module = None
        merged = self._merged(segment)
        for part in segment.parts:
            if part in merged.values():
                continue
            if part.op.module != module:
                module = part.op.module
                lines.append(f"{INDENT}# {module or self._made.plan.graph.name}")
            lines.append(INDENT + self._statement(part, merged.get(part)))
        outs = [value.name for value in self._exports[segment]]
        lines.append(f"{INDENT}return {_tuple(outs)}")
        return "\n".join(lines)

    def _merged(self, segment: Segment) -> dict[Part, Part]:
        """Parts that add a bias, with the product that each adds it to, which is made in one call.

        They are two ops so that a sum may be cut; where it is not, torch does both at once.
        """
        exported = {value.name for value in self._exports[segment]}
        makers = {self._part_value(part, 0).name: part for part in segment.parts}
        found = {}
        for part in segment.parts:
            if part.op.kind != "add_bias":
                continue
            sources = self._source(part, 0)
            product = makers.get(sources[0].name) if len(sources) == 1 else None
            if product is None or sources[0].name in exported:
                continue
            has_one_reader = len(self._made.plan.graph.readers[product.op.outputs[0]]) == 1
            takes_bias = product.op.code.startswith(_TAKE_BIAS) and len(product.inputs) == 2
            is_whole = product.outputs[0].box == part.inputs[0].box
            if has_one_reader and takes_bias and is_whole and not product.outputs[0].summand:
                found[part] = product
        return found

    def _statement(self, part: Part, product: Part | None = None) -> str:
        """What a part computes; with the product to which it adds a bias, if they are one call."""
        outs = ", ".join(self._part_value(part, i).name for i in range(len(part.outputs)))
        if product is None:
            return f"{outs} = {self._call_text(part)}"
        bias = self._expression(part, 1)
        return f"{outs} = {self._call_text(product).removesuffix(')')}, bias={bias})"

    def _call_text(self, part: Part) -> str:
        operands = [self._expression(part, position) for position in range(len(part.inputs))]
        return part.call(operands, seed=f"rng + {part.op.index}")

    def _expression(self, part: Part, position: int) -> str:
        """What an operand of a part is made of, as an expression."""
        box = part.inputs[position].box
        sources = self._source(part, position)
        return _combined(box, sources)

    # --- edges ----------------------------------------------------------------------------------

    def _edges_from_here(self) -> Iterable[Edge]:
        """Edges that this device feeds in this stage."""
        inside = [step.edge for step in self._steps if isinstance(step, Move)]
        edges = [*inside, *self._made.crossing_from(self._stage)]
        return (edge for edge in edges if self._device in edge.src.shards)

    def _edge_source(self, edge: Edge) -> list[Value]:
        """What this device feeds an edge from."""
        if edge.parent is not None:
            return [self._edge_value(edge.parent)]
        view = VTensor(edge.tensor, edge.src.shards[self._device].box, ())
        return self._writers(view)

    def _packed(self, edge: Edge) -> str:
        """This device's shard of an edge, as an expression."""
        if self._device not in edge.src.shards:
            return "None"
        box = edge.src.shards[self._device].box
        return _combined(box, self._edge_source(edge))

    def _unpack_grad(self, edge: Edge, grad: str) -> None:
        """Give the gradient of a shard to what the shard was made of."""
        box = edge.src.shards[self._device].box
        for value in self._edge_source(edge):
            self._grads.setdefault(value.name, []).append(grad + index_text(value.box, box))

    # --- the stage ------------------------------------------------------------------------------

    def _forward(self) -> str:
        lines = self._header("forward")
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards:
                lines.append(f'{self._edge_value(edge).name} = run.receive("{edge.name}", mb)')
        for step in self._steps:
            if isinstance(step, Segment):
                lines += self._call(step)
            elif isinstance(step, Move):
                lines += self._move(step.edge)
            elif isinstance(step, Open | Close):
                lines += self._window(step, is_forward=True)
        for edge in self._made.crossing_from(self._stage):
            if self._device in edge.src.shards:
                lines.append(f'run.send("{edge.name}", mb, {self._packed(edge)})')
        return _function(lines)

    def _header(self, which: str) -> list[str]:
        return [f"def stage{self._stage}_{which}(run, mb):"]

    def _call(self, segment: Segment) -> list[str]:
        with_grad, others = self._args[segment]
        outs = self._exports[segment]
        # What has no gradient has no backward, so nothing is kept for it.
        which = "forward" if any(value.has_grad for value in outs) else "compute"
        given = _tuple(v.name for v in with_grad)
        head = f"{_left(v.name for v in outs)}run.{which}({segment.name}, mb, {given}, ("
        texts = [v.text for v in others]
        lines = [wrapped(head, texts, ",))" if len(texts) == 1 else "))", INDENT)]
        lines += [f"run.add_loss({name})" for name in self._loss_names(segment)]
        return lines

    def _move(self, edge: Edge) -> list[str]:
        shard = self._packed(edge)
        call = f'run.move("{edge.name}", {shard}){self._comment(edge.forward)}'
        if self._device not in edge.dst.shards:
            return [call]
        if len(edge.forward) == 1 and edge.forward[0].is_idle:
            call = shard
        return [f"{self._edge_value(edge).name} = {call}"]

    def _window(self, step: Open | Close, is_forward: bool) -> list[str]:
        uses = [
            use
            for use in self._made.uses_of.get(step.window, ())
            if self._device in use.storage.shards or self._device in use.side.shards
        ]
        if not uses:
            return []
        names = f"[{', '.join(repr(use.name) for use in uses)}]"
        table: Mapping[tuple[bool, bool], list[str]] = {
            (True, True): [f"run.gather({names})"] if step.window.gathers else [],
            (False, True): [f"run.drop({names})"] if step.window.gathers else [],
            (False, False): [f"run.gather({names})"] if step.window.gathers else [],
            (True, False): [f"run.reduce({names})"],
        }
        return table[isinstance(step, Open), is_forward]

    def _comment(self, legs: Sequence[Transfer]) -> str:
        """What a move does, for the reader of the file."""
        if len(legs) > 1:
            return f"  # {len(legs)} regions"
        steps = legs[0].plan(self._made.topology).path.steps
        kinds = " + ".join(step.kind for step in steps)
        return f"  # {kinds}: {legs[0].src.rvd} -> {legs[0].dst.rvd}"

    # --- the way back ---------------------------------------------------------------------------

    def _backward(self) -> str:
        self._grads = {}
        lines = self._header("backward")
        for edge in self._made.crossing_from(self._stage):
            if self._device in edge.src.shards and edge.backward:
                grad = self._grad_name(edge, edge.tensor.name)
                lines.append(f'{grad} = run.receive_grad("{edge.name}", mb)')
                self._unpack_grad(edge, grad)
        for step in reversed(self._steps):
            if isinstance(step, Segment):
                lines += self._call_back(step)
            elif isinstance(step, Move):
                lines += self._move_back(step.edge)
            elif isinstance(step, Open | Close):
                lines += self._window(step, is_forward=False)
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards and edge.backward:
                grad = self._sum(self._edge_value(edge).name)
                lines.append(f'run.send_grad("{edge.name}", mb, {grad})')
        return _function(lines)

    def _grad_name(self, source: Segment | Edge, name: str) -> str:
        """The variable of the gradient of a value that comes from a segment or an edge."""
        return self._names.of((source, name), f"g_{name}")

    def _sum(self, name: str) -> str:
        """The gradient of a value, from all who read it."""
        return " + ".join(self._grads.get(name, [])) or "None"

    def _call_back(self, segment: Segment) -> list[str]:
        outs = [value for value in self._exports[segment] if value.has_grad]
        if not outs:
            return []
        loss = self._loss_names(segment)
        grads = ["run.loss_grad" if v.name in loss else self._sum(v.name) for v in outs]
        with_grad, _ = self._args[segment]
        results = [self._grad_name(segment, value.name) for value in with_grad]
        for value, result in zip(with_grad, results, strict=True):
            self._grads.setdefault(value.name, []).append(result)
        return [f"{_left(results)}run.backward({segment.name}, mb, {_tuple(grads)})"]

    def _move_back(self, edge: Edge) -> list[str]:
        if not edge.backward:
            return []
        grad = "None"
        if self._device in edge.dst.shards:
            grad = self._sum(self._edge_value(edge).name)
        call = f'run.move_back("{edge.name}", {grad}){self._comment(edge.backward)}'
        if self._device not in edge.src.shards:
            return [call]
        if len(edge.backward) == 1 and edge.backward[0].is_idle and grad != "None":
            call = grad
        name = self._grad_name(edge, edge.tensor.name)
        self._unpack_grad(edge, name)
        return [f"{name} = {call}"]


def index_text(box: rv.Box, within: rv.Box) -> str:
    """The index of ``box`` in a tensor that holds ``within``; nothing if it is all of it."""
    if box == within:
        return ""
    ranges = []
    for lo, hi, base, top in zip(box.lo, box.hi, within.lo, within.hi, strict=True):
        ranges.append(":" if (lo, hi) == (base, top) else f"{lo - base}:{hi - base}")
    while ranges and ranges[-1] == ":":
        ranges.pop()
    return f"[{', '.join(ranges)}]"


def _combined(box: rv.Box, sources: Sequence[Value]) -> str:
    """The sum, in ``box``, of values that each hold some of it."""
    if len(sources) == 1:
        return sources[0].name + index_text(box, sources[0].box)
    if all(value.box.contains(box) for value in sources):
        return "(" + " + ".join(v.name + index_text(box, v.box) for v in sources) + ")"
    pieces = ", ".join(f'({v.name}, "{v.box}")' for v in sources)
    return f'ops.join("{box}", [{pieces}])'


def _tuple(items: Iterable[str]) -> str:
    given = list(items)
    return "(" + ", ".join(given) + ("," if len(given) == 1 else "") + ")"


def _left(names: Iterable[str]) -> str:
    """What a tuple is assigned to; nothing if it is empty."""
    given = list(names)
    return f"{_tuple(given)} = " if given else ""


def wrapped(head: str, items: Sequence[str], tail: str, indent: str = "") -> str:
    """A call or signature, broken where its line would be too long; ``indent`` is around it."""
    line = f"{head}{', '.join(items)}{tail}"
    if len(indent + line) <= WIDTH or not items:
        return line
    inner = 2 * INDENT
    body = fill(
        ", ".join(items) + ",",
        WIDTH,
        initial_indent=inner,
        subsequent_indent=inner,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{head}\n{body}\n{indent}{tail.lstrip(',')}"


def _function(lines: Sequence[str]) -> str:
    body = lines[1:] or ["pass"]
    return "\n".join([lines[0], *(INDENT + line for line in body)])
