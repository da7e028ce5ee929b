"""Text form: a key for everything that the functions of a stage on one device depend on.

Devices that do the same work on other boxes have functions with equal texts, because a text
contains positions within the device's shard, not in the whole tensor. Each text is written once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import rvdcomm as rv
from superscaler_core.codegen.text import index_text
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import CONSTANT, INPUT, PARAMETER, VTensor
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment, Step
from superscaler_core.program.sequence import Close, Move, Open
from superscaler_core.program.verb import Verb
from superscaler_core.program.weights import Use
from superscaler_core.schedules import ActionKind


def text_form(made: Materialized, stage: int, device: Device) -> Hashable:
    """A key that is equal for devices whose functions of a stage have the same text.

    Law (tests/superscaler_core/codegen/test_text_form.py): the files are the same as if the
    functions of every device were written separately.

    Args:
        made: the plan.
        stage, device: the stage and the device.
    """
    return _TextForm(made, device).of(stage)


class _TextForm:
    """Computes the forms of stages on one device."""

    def __init__(self, made: Materialized, device: Device) -> None:
        self._made, self._device = made, device
        self._places: dict[Part, int] = {}
        self._stage = 0

    def of(self, stage: int) -> Hashable:
        """The form of one stage."""
        self._stage, program = stage, self._made.stages[stage]
        runs = tuple(tuple(map(self._instruction, self._on(run))) for run in program.order)
        steps = program.steps[self._device]
        parts = [part for step in steps if isinstance(step, Segment) for part in step.parts]
        self._places = {part: place for place, part in enumerate(parts)}
        crossing = (*self._made.crossing_to(stage), *self._made.crossing_from(stage))
        return (
            tuple(map(self._step, steps)),
            tuple(map(self._edge, crossing)),
            runs,
        )

    def _on(self, run: ActionKind) -> Sequence[StepInstruction]:
        return self._made.step_program.on(self._device, self._stage, run)

    def _instruction(self, instruction: StepInstruction) -> Hashable:
        i = instruction
        here = None
        if i.kind in (Verb.FETCH, Verb.REDUCE):
            here = self._names(self._made.uses_of(i))
        return i.kind, i.name, i.phase, i.half, i.microbatch, here

    def _names(self, uses: Iterable[Use]) -> tuple[str, ...]:
        """The names of the weights that the device reads or stores."""
        here = self._device
        return tuple(u.name for u in uses if here in u.storage.shards or here in u.side.shards)

    def _step(self, step: Step) -> Hashable:
        if isinstance(step, Segment):
            places = self._places
            sums = tuple((places[a], places[b]) for a, b in step.products.items())
            marks = step.recompute, step.swap, step.span, step.has_backward, step.is_left_out
            return step.name, marks, sums, tuple(map(self._part, step.parts))
        if isinstance(step, Move):
            return self._edge(step.edge)
        assert isinstance(step, Open | Close)
        return type(step), self._names(self._made.uses_in(step.window))

    def _part(self, part: Part) -> Hashable:
        form = part.form
        boxes = [box for box, _ in form.inputs]
        inputs = tuple(self._input(part, i, box) for i, box in enumerate(boxes))
        return part.op, form.call, inputs

    def _input(self, part: Part, position: int, box: rv.Box) -> Hashable:
        """Where an input of a part comes from, as found by ``Values.source``."""
        op = part.op
        edge = self._made.edges.of_reader.get((op, position))
        if edge is not None:
            return edge, index_text(box, edge.dst.shards[self._device].box)
        tensor = op.inputs[position]
        if tensor.kind in (INPUT, CONSTANT):
            return box
        if tensor.kind == PARAMETER:
            use = self._made.weights.of_reader[op, position]
            return use, index_text(box, use.side.shards[self._device].box)
        return self._made_of(part.inputs[position])

    def _made_of(self, view: VTensor) -> Hashable:
        """The parts on this device that compute a value, and the position of the value in each."""
        op = self._made.plan.graph.producer[view.tensor]
        position, box = op.outputs.index(view.tensor), view.box
        parts = self._made.parts_on(op, self._device)
        results = [(part, *part.form.outputs[position]) for part in parts]
        if len(results) == 1:
            part, made, _ = results[0]
            return self._places[part], _within(box, made)
        # Several results are summed or joined; the text then contains their boxes.
        return tuple((self._places[part], box, made, summand) for part, made, summand in results)

    def _edge(self, edge: Edge) -> Hashable:
        """An edge, and the values that this device writes to it."""
        here = self._device
        source: Hashable = None
        if edge.src_stage == self._stage and here in edge.src.shards:
            box = edge.src.shards[here].box
            if edge.parent is not None:
                source = _within(box, edge.parent.dst.shards[here].box)
            else:
                source = self._made_of(VTensor(edge.tensor, box, ()))
        return edge, here in edge.dst.shards, source


def _within(box: rv.Box, held: rv.Box) -> Hashable:
    """The position of each of two boxes in the other."""
    return "" if box == held else (index_text(box, held), index_text(held, box))
