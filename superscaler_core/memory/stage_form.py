"""Stage form: a key for everything that the memory of a stage on one device depends on.

The key contains no names. Stages of equal layers have equal forms, within a plan and across plans,
so each form is run without data only once.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import PARAMETER, PTensor
from superscaler_core.plan import Device
from superscaler_core.plan.savings import Window
from superscaler_core.program.buckets import Bucket
from superscaler_core.program.edges import Edge
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment, Step
from superscaler_core.program.sequence import Close, Move, Open
from superscaler_core.program.side import Side
from superscaler_core.program.transfer import Transfer
from superscaler_core.program.weights import Use


def stored_name(tensor: PTensor) -> str:
    """The name that the dry run uses for the gradient of a parameter where it is stored."""
    return f"{tensor.name} (stored)"


class StageForm:
    """Numbers the objects of a stage on a device in the order in which they appear.

    Laws (tests/superscaler_core/memory/test_stage_form.py): stages with equal keys have equal
    footprints except for names; everything that the dry run reads of a plan is in the key.

    Args:
        made: the plan.
        stage, device: the stage and the device.

    Attributes:
        key: equal for stages whose memory is equal.
        grads: for each name of an accumulated gradient in the dry run, a name that is the same
            for all stages of the form.
        segments: the same for names of segments.
    """

    def __init__(self, made: Materialized, stage: int, device: Device) -> None:
        self._made, self._device = made, device
        self._numbers: dict[Hashable, int] = {}
        self._details: list[Hashable] = []
        self._uses: dict[Use, int] = {}
        steps = made.stages[stage].steps[device]
        segments = [step.name for step in steps if isinstance(step, Segment)]
        self.segments = {name: str(number) for number, name in enumerate(segments)}
        crossing = [*made.crossing_to(stage), *made.crossing_from(stage)]

        def here(instruction: StepInstruction) -> bool:
            return device in instruction.devices

        body = (
            tuple(map(self._step, steps)),
            tuple(self._edge(edge) for edge in crossing if device in edge.devices),
            tuple(
                (run, tuple(self._instruction(i) for i in made.block(stage, run) if here(i)))
                for run in made.stages[stage].order
            ),
            tuple(sorted(map(self._number, made.plan.graph.ends))),
        )
        self.key: Hashable = body, tuple(self._details)
        self.grads = {use.name: str(number) for use, number in self._uses.items()}
        for use, number in self._uses.items():
            self.grads.setdefault(stored_name(use.tensor), f"{number} stored")

    def _number(self, what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    # --- steps ----------------------------------------------------------------------------------

    def _step(self, step: Step) -> Hashable:
        if isinstance(step, Segment):
            marks = step.recompute, step.swap, step.span, step.has_backward, step.is_left_out
            parts = tuple(map(self._part, step.parts))
            places = {part: place for place, part in enumerate(step.parts)}
            sums = tuple((places[a], places[b]) for a, b in step.products.items())
            return self._number(step), marks, parts, sums
        if isinstance(step, Move):
            return self._edge(step.edge)
        assert isinstance(step, Open | Close)
        return type(step), self._window(step.window)

    def _part(self, part: Part) -> Hashable:
        op, numbers = part.op, self._numbers
        of_reader = self._made.edges.of_reader
        sources: list[int] = []
        for position, tensor in enumerate(op.inputs):
            source: Any = tensor
            if tensor.kind == PARAMETER:
                source = self._made.weights.of_reader[op, position]
                self._use(source)
            else:
                source = of_reader.get((op, position), tensor)
            sources.append(numbers.setdefault(source, len(numbers)))
        results = [numbers.setdefault(tensor, len(numbers)) for tensor in op.outputs]
        return part.form, tuple(sources), tuple(results)

    def _instruction(self, instruction: StepInstruction) -> Hashable:
        i = instruction
        what, done = self._made.subject(i), (i.kind, i.phase, i.half)
        if isinstance(what, Edge):
            return done, self._edge(what)
        if isinstance(what, Window):
            return done, self._window(what)
        if isinstance(what, Bucket):
            return done  # The dry run counts buckets at the step's start and end.
        # Any other object is used as it is, so that no other stage has an equal key.
        return done, self._number(what) if isinstance(what, Segment) else what

    # --- objects of steps -----------------------------------------------------------------------

    def _edge(self, edge: Edge) -> int:
        is_new = edge not in self._numbers
        number = self._number(edge)
        if is_new:
            detail = (
                number,
                self._number(edge.tensor),
                edge.tensor.dtype,
                self._box(edge.src),
                self._box(edge.dst),
                None if edge.parent is None else self._edge(edge.parent),
                edge.has_grad,
                edge.src_stage == edge.dst_stage,
                edge.recycles is None,
                bool(edge.result),
                self._legs(edge.forward),
                self._legs(edge.backward),
            )
            self._details.append(detail)
        return number

    def _legs(self, legs: Sequence[Transfer]) -> Hashable:
        here = self._device
        return tuple((leg.is_idle, leg.dst.cell(here) if here in leg.dst else None) for leg in legs)

    def _window(self, window: Window) -> int:
        is_new = window not in self._numbers
        number = self._number(window)
        if is_new:
            uses = self._in_window(self._made.uses_in(window))
            self._details.append((number, window.gathers, tuple(map(self._use, uses))))
        return number

    def _in_window(self, uses: Iterable[Use]) -> Iterable[Use]:
        here = self._device
        return (use for use in uses if here in use.storage.shards or here in use.side.shards)

    def _use(self, use: Use) -> int:
        number = self._uses.get(use)
        if number is None:
            number = self._uses[use] = len(self._uses)
            detail = (
                number,
                self._number(use.tensor),
                use.tensor.dtype,
                use.is_trained,
                use.window is None,
                use.is_fetched,
                bool(use.reduce),
                use.tensor.name in self._made.plan.on_host,
                self._box(use.side),
                self._box(use.storage),
            )
            self._details.append(detail)
        return number

    def _box(self, side: Side) -> Hashable:
        shard = side.shards.get(self._device)
        return None if shard is None else shard.box
