"""Flow: the values that segments and edges of one stage on one device pass to each other."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

from superscaler_core.codegen.values import Value, Values
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment, Step
from superscaler_core.program.sequence import Move


class Flow:
    """The inputs and results of every step.

    Args:
        made: the plan.
        stage, device: the stage and the device.
        values: the values of the device.

    Attributes:
        segments: the segments among the steps.
        args: for each segment its inputs: values with gradients, and others.
        exports: for each segment its results: values that others read, that edges move, the loss,
            values of buffers.
        summands: for each summand of a sum that an edge moves, the edges that move the sum.
        spans: the steps of each span that is rerun, by its number.
    """

    def __init__(
        self,
        made: Materialized,
        stage: int,
        device: Device,
        values: Values,
    ) -> None:
        self._made, self._stage, self._device = made, stage, device
        self._steps = steps = made.stages[stage].steps[device]
        self._values = values
        self.segments = [step for step in steps if isinstance(step, Segment)]
        self._maker = {
            value.name: segment for segment in self.segments for value in self._made_in(segment)
        }
        self.exports = self._find_exports()
        self.args = {segment: self._args_of(segment) for segment in self.segments}
        self.summands = self._find_summands()
        self.spans = {n: tuple(run) for n, run in groupby(steps, self.span) if n}

    # --- segments -------------------------------------------------------------------------------

    def _made_in(self, segment: Segment) -> list[Value]:
        return [
            self._values.of_part(part, i)
            for part in segment.parts
            for i in range(len(part.outputs))
        ]

    def _read_by(self, segment: Segment) -> dict[str, Value]:
        """The values that a segment reads and does not compute itself."""
        return {
            value.name: value
            for part in segment.parts
            for position in range(len(part.inputs))
            for value in self._values.source(part, position)
            if self._maker.get(value.name) is not segment
        }

    def _args_of(self, segment: Segment) -> tuple[list[Value], list[Value]]:
        values = list(self._read_by(segment).values())
        return [v for v in values if v.has_grad], [v for v in values if not v.has_grad]

    def _find_exports(self) -> dict[Segment, list[Value]]:
        wanted = {name for segment in self.segments for name in self._read_by(segment)}
        for edge in self._edges_from_here():
            wanted |= {value.name for value in self._values.edge_source(edge)}
        found: dict[Segment, list[Value]] = {}
        for segment in self.segments:
            wanted.update(self.loss_names(segment), self.state_names(segment).values())
            chosen = [value for value in self._made_in(segment) if value.name in wanted]
            found[segment] = sorted(chosen, key=lambda value: not value.has_grad)
        return found

    def loss_names(self, segment: Segment) -> list[str]:
        """The variables of the loss that a segment computes."""
        losses = self._made.plan.graph.losses
        parts = [part for part in segment.parts if part.op.outputs[0] in losses]
        return [self._values.of_part(part, 0).name for part in parts]

    def state_names(self, segment: Segment) -> dict[str, str]:
        """The buffers that a segment replaces, each with the variable of its new value."""
        buffers = {kept: buffer for buffer, kept in self._made.plan.graph.state.items()}
        parts = [part for part in segment.parts if part.op.outputs[0] in buffers]
        return {
            buffers[part.op.outputs[0]].name: self._values.of_part(part, 0).name for part in parts
        }

    # --- edges ----------------------------------------------------------------------------------

    def _edges_from_here(self) -> Iterable[Edge]:
        """The edges whose values this device writes in this stage."""
        inside = [step.edge for step in self._steps if isinstance(step, Move)]
        edges = [*inside, *self._made.crossing_from(self._stage)]
        return (edge for edge in edges if self._device in edge.src.shards)

    def _find_summands(self) -> dict[str, list[Edge]]:
        found: dict[str, list[Edge]] = {}
        for edge in self._edges_from_here():
            box = edge.src.shards[self._device].box
            sources = self._values.edge_source(edge)
            if len(sources) > 1 and all(value.box == box for value in sources):
                for value in sources:
                    found.setdefault(value.name, []).append(edge)
        return found

    # --- spans that are rerun -------------------------------------------------------------------

    def span(self, step: Step) -> int:
        """The number of the span that contains a step; 0 if none."""
        return self._made.stages[self._stage].given.span(step)

    def entering(self, span: int) -> list[Value]:
        """The values that the steps of a span read and none of them computes."""
        read: dict[str, Value] = {}
        made: set[str] = set()
        for step in self.spans[span]:
            if isinstance(step, Segment):
                with_grad, others = self.args[step]
                values = with_grad + [v for v in others if v.text == v.name]
                made |= {value.name for value in self.exports[step]}
            elif isinstance(step, Move):
                here = self._device in step.edge.src.shards
                values = self._values.edge_source(step.edge) if here else []
                if self._device in step.edge.dst.shards:
                    made.add(self._values.of_edge(step.edge).name)
            else:
                continue
            read |= {value.name: value for value in values}
        return [value for name, value in read.items() if name not in made]

    def is_summed_in(self, edge: Edge, span: int) -> bool:
        """Whether an edge and all summands that it moves are in a span."""
        makers = (self._maker[value.name] for value in self._values.edge_source(edge))
        return self.span(Move(edge)) == span and all(maker.span == span for maker in makers)
