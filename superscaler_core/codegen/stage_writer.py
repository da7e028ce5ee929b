"""StageWriter: the functions of one stage on one device, as Python text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from superscaler_core.codegen.free import freed
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segment_writer import SegmentWriter
from superscaler_core.codegen.segments import Segment, Step
from superscaler_core.codegen.text import INDENT, assigned, function, index_text, tuple_of, wrapped
from superscaler_core.codegen.totals import Totals
from superscaler_core.codegen.values import Value, Values, combined
from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.sequence import Close, Move, Open
from superscaler_core.materialize.side import Device
from superscaler_core.materialize.transfer import Transfer


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
        self._grads = Totals(names)
        self._sums = Totals(names)
        self._values = Values(made, device, names)
        self._segments = [step for step in steps if isinstance(step, Segment)]
        self._maker = {
            self._values.of_part(part, i).name: segment
            for segment in self._segments
            for part in segment.parts
            for i in range(len(part.outputs))
        }
        self._exports = self._find_exports()
        self._args = {segment: self._args_of(segment) for segment in self._segments}
        self._summands = self._find_summands()
        self._spans = {n: tuple(run) for n, run in groupby(steps, self._span) if n}

    # --- what the file gets ---------------------------------------------------------------------

    def functions(self) -> list[str]:
        """Segments, then the stage's forward and backward."""
        writer = SegmentWriter(self._made, self._values)
        texts = []
        for segment in self._segments:
            with_grad, others = self._args[segment]
            texts.append(writer.function(segment, with_grad + others, self._exports[segment]))
        return [*texts, self._forward(), self._backward()]

    @property
    def recomputed(self) -> list[str]:
        """Segments whose backward runs their forward again."""
        return [segment.name for segment in self._segments if segment.recompute]

    @property
    def swapped(self) -> list[str]:
        """Segments that keep on the host what their backward needs."""
        return [segment.name for segment in self._segments if segment.swap]

    # --- segments -------------------------------------------------------------------------------

    def _args_of(self, segment: Segment) -> tuple[list[Value], list[Value]]:
        """What a segment is given: values that have gradients, and others."""
        found = {
            value.name: value
            for part in segment.parts
            for position in range(len(part.inputs))
            for value in self._values.source(part, position)
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
            for value in self._values.source(part, position)
            if self._maker.get(value.name) is not segment
        }
        for edge in self._edges_from_here():
            wanted |= {value.name for value in self._values.edge_source(edge)}
        found: dict[Segment, list[Value]] = {}
        for segment in self._segments:
            wanted.update(self._loss_names(segment))
            outs = [
                self._values.of_part(part, i)
                for part in segment.parts
                for i in range(len(part.outputs))
            ]
            chosen = [value for value in outs if value.name in wanted]
            found[segment] = sorted(chosen, key=lambda value: not value.has_grad)
        return found

    def _loss_names(self, segment: Segment) -> list[str]:
        loss = self._made.plan.graph.loss
        parts = [part for part in segment.parts if part.op.outputs[0] == loss]
        return [self._values.of_part(part, 0).name for part in parts]

    # --- edges ----------------------------------------------------------------------------------

    def _edges_from_here(self) -> Iterable[Edge]:
        """Edges that this device feeds in this stage."""
        inside = [step.edge for step in self._steps if isinstance(step, Move)]
        edges = [*inside, *self._made.crossing_from(self._stage)]
        return (edge for edge in edges if self._device in edge.src.shards)

    def _packed(self, edge: Edge) -> str:
        """This device's shard of an edge, as an expression."""
        if self._device not in edge.src.shards:
            return "None"
        box = edge.src.shards[self._device].box
        return self._sums.of(edge) or combined(box, self._values.edge_source(edge))

    def _find_summands(self) -> dict[str, list[Edge]]:
        """What edges take a sum of that several parts here make: by summand, the edges."""
        found: dict[str, list[Edge]] = {}
        for edge in self._edges_from_here():
            box = edge.src.shards[self._device].box
            sources = self._values.edge_source(edge)
            if len(sources) > 1 and all(value.box == box for value in sources):
                for value in sources:
                    found.setdefault(value.name, []).append(edge)
        return found

    def _unpack_grad(self, edge: Edge, grad: str) -> list[str]:
        """Give the gradient of a shard to what the shard was made of."""
        box = edge.src.shards[self._device].box
        return [
            line
            for value in self._values.edge_source(edge)
            for line in self._add_grad(value.name, grad + index_text(value.box, box))
        ]

    def _add_grad(self, name: str, grad: str) -> list[str]:
        """Count a gradient of a value that several may read."""
        return self._grads.add(name, f"g_{name}_sum", grad)

    # --- what is run again as a whole -----------------------------------------------------------

    def _span(self, step: Step) -> int:
        """The number of the span that a step is in; 0 if in none."""
        if isinstance(step, Segment):
            return step.span
        return self._made.spans[self._stage].get(step, 0)

    def _entering(self, span: int) -> list[Value]:
        """What the steps of a span read that none of them makes."""
        read: dict[str, Value] = {}
        made: set[str] = set()
        for step in self._spans[span]:
            if isinstance(step, Segment):
                with_grad, others = self._args[step]
                values = with_grad + [v for v in others if v.text == v.name]
                made |= {value.name for value in self._exports[step]}
            elif isinstance(step, Move):
                here = self._device in step.edge.src.shards
                values = self._values.edge_source(step.edge) if here else []
                if self._device in step.edge.dst.shards:
                    made.add(self._values.of_edge(step.edge).name)
            else:
                continue
            read |= {value.name: value for value in values}
        return [value for name, value in read.items() if name not in made]

    def _keep(self, span: int) -> list[str]:
        values = tuple_of(v.name for v in self._entering(span))
        return [f'run.keep("stage{self._stage}_span{span}", mb, {values})']

    def _run_again(self, span: int) -> list[str]:
        """The forward of a span once more, which now keeps what its backward needs."""
        values = self._entering(span)
        kept = f'run.kept("stage{self._stage}_span{span}", mb)'
        lines = [f"{assigned(v.name for v in values)}{kept}"]
        self._sums = Totals(self._names)
        return lines + [line for step in self._spans[span] for line in self._step(step, span)]

    # --- the stage ------------------------------------------------------------------------------

    def _forward(self) -> str:
        lines = []
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards:
                call = "receive" if edge.recycles is None else "recycled"
                lines.append(f'{self._values.of_edge(edge).name} = run.{call}("{edge.name}", mb)')
        for span, steps in groupby(self._steps, self._span):
            lines += self._keep(span) if span else []
            lines += [line for step in steps for line in self._step(step)]
        for edge in self._made.crossing_from(self._stage):
            if self._device in edge.src.shards:
                call = "send" if edge.recycles is None else "recycle"
                lines.append(f'run.{call}("{edge.name}", mb, {self._packed(edge)})')
        return function(f"def stage{self._stage}_forward(run, mb):", freed(lines))

    def _step(self, step: Step, again: int = 0) -> list[str]:
        """The forward of one step; of the span that it is in, ``again`` if that is run again."""
        if isinstance(step, Segment):
            return [*self._call(step, again), *self._add_up(step, again)]
        if isinstance(step, Move):
            return self._move(step.edge)
        assert isinstance(step, Open | Close)
        return self._window(step, is_forward=True)

    def _call(self, segment: Segment, again: int) -> list[str]:
        with_grad, others = self._args[segment]
        outs = self._exports[segment]
        # What has no gradient has no backward, so nothing is kept for it; nor before it runs again.
        keeps = any(value.has_grad for value in outs) and segment.span == again
        which = "forward" if keeps else "compute"
        given = tuple_of(v.name for v in with_grad)
        head = f"{assigned(v.name for v in outs)}run.{which}({segment.name}, mb, {given}, ("
        texts = [v.text for v in others]
        lines = [wrapped(head, texts, ",))" if len(texts) == 1 else "))", INDENT)]
        if not again:
            lines += [f"run.add_loss({name})" for name in self._loss_names(segment)]
        return lines

    def _add_up(self, segment: Segment, again: int) -> list[str]:
        """Add what a segment made to the sums that edges take."""
        return [
            line
            for value in self._exports[segment]
            for edge in self._summands.get(value.name, ())
            if not again or self._is_summed_in(edge, again)
            for line in self._sums.add(edge, f"{edge.tensor.name}_sum", value.name)
        ]

    def _is_summed_in(self, edge: Edge, span: int) -> bool:
        """Whether all summands that an edge takes, and the edge, are in a span."""
        makers = (self._maker[value.name] for value in self._values.edge_source(edge))
        return self._span(Move(edge)) == span and all(maker.span == span for maker in makers)

    def _move(self, edge: Edge) -> list[str]:
        shard = self._packed(edge)
        call = f'run.move("{edge.name}", {shard}){self._comment(edge.forward)}'
        if self._device not in edge.dst.shards:
            return [call]
        if len(edge.forward) == 1 and edge.forward[0].is_idle:
            call = shard
        return [f"{self._values.of_edge(edge).name} = {call}"]

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
        lines = []
        for edge in self._made.crossing_from(self._stage):
            if self._device in edge.src.shards and edge.backward:
                grad = self._grad_name(edge, edge.tensor.name)
                lines.append(f'{grad} = run.receive_grad("{edge.name}", mb)')
                lines += self._unpack_grad(edge, grad)
        for span, steps in groupby(reversed(self._steps), self._span):
            lines += self._run_again(span) if span else []
            lines += [line for step in steps for line in self._step_back(step)]
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards and edge.backward:
                grad = self._sum(self._values.of_edge(edge).name)
                lines.append(f'run.send_grad("{edge.name}", mb, {grad})')
        return function(f"def stage{self._stage}_backward(run, mb):", freed(lines))

    def _step_back(self, step: Step) -> list[str]:
        """The backward of one step."""
        if isinstance(step, Segment):
            return self._call_back(step)
        if isinstance(step, Move):
            return self._move_back(step.edge)
        assert isinstance(step, Open | Close)
        return self._window(step, is_forward=False)

    def _grad_name(self, source: Segment | Edge, name: str) -> str:
        """The variable of the gradient of a value that comes from a segment or an edge."""
        return self._names.of((source, name), f"g_{name}")

    def _sum(self, name: str) -> str:
        """The gradient of a value, from all who read it."""
        return self._grads.of(name) or "None"

    def _call_back(self, segment: Segment) -> list[str]:
        outs = [value for value in self._exports[segment] if value.has_grad]
        if not outs:
            return []
        loss = self._loss_names(segment)
        grads = ["run.loss_grad" if v.name in loss else self._sum(v.name) for v in outs]
        with_grad, _ = self._args[segment]
        results = [self._grad_name(segment, value.name) for value in with_grad]
        lines = [f"{assigned(results)}run.backward({segment.name}, mb, {tuple_of(grads)})"]
        for value, result in zip(with_grad, results, strict=True):
            lines += self._add_grad(value.name, result)
        return lines

    def _move_back(self, edge: Edge) -> list[str]:
        if not edge.backward:
            return []
        grad = "None"
        if self._device in edge.dst.shards:
            grad = self._sum(self._values.of_edge(edge).name)
        call = f'run.move_back("{edge.name}", {grad}){self._comment(edge.backward)}'
        if self._device not in edge.src.shards:
            return [call]
        if len(edge.backward) == 1 and edge.backward[0].is_idle and grad != "None":
            call = grad
        name = self._grad_name(edge, edge.tensor.name)
        return [f"{name} = {call}", *self._unpack_grad(edge, name)]
