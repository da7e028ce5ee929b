"""StageWriter: the functions of one stage on one device, as Python text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby

from superscaler_core.codegen.flow import Flow
from superscaler_core.codegen.free import freed
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segment_writer import SegmentWriter
from superscaler_core.codegen.segments import Segment, Step
from superscaler_core.codegen.text import INDENT, assigned, function, index_text, tuple_of, wrapped
from superscaler_core.codegen.totals import Totals
from superscaler_core.codegen.values import Values, combined
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
        self._flow = Flow(made, stage, device, steps, self._values)

    # --- what the file gets ---------------------------------------------------------------------

    def functions(self) -> list[str]:
        """Segments, then the stage's forward and backward."""
        writer = SegmentWriter(self._made, self._values)
        texts = []
        for segment in self._flow.segments:
            with_grad, others = self._flow.args[segment]
            texts.append(writer.function(segment, with_grad + others, self._flow.exports[segment]))
        return [*texts, self._forward(), self._backward()]

    @property
    def recomputed(self) -> list[str]:
        """Segments whose backward runs their forward again."""
        return [segment.name for segment in self._flow.segments if segment.recompute]

    @property
    def swapped(self) -> list[str]:
        """Segments that keep on the host what their backward needs."""
        return [segment.name for segment in self._flow.segments if segment.swap]

    # --- edges ----------------------------------------------------------------------------------

    def _packed(self, edge: Edge) -> str:
        """This device's shard of an edge, as an expression."""
        if self._device not in edge.src.shards:
            return "None"
        box = edge.src.shards[self._device].box
        return self._sums.of(edge) or combined(box, self._values.edge_source(edge))

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

    def _keep(self, span: int) -> list[str]:
        values = tuple_of(v.name for v in self._flow.entering(span))
        return [f'run.keep("stage{self._stage}_span{span}", mb, {values})']

    def _run_again(self, span: int) -> list[str]:
        """The forward of a span once more, which now keeps what its backward needs."""
        values = self._flow.entering(span)
        kept = f'run.kept("stage{self._stage}_span{span}", mb)'
        lines = [f"{assigned(v.name for v in values)}{kept}"]
        self._sums = Totals(self._names)
        return lines + [line for step in self._flow.spans[span] for line in self._step(step, span)]

    # --- the stage ------------------------------------------------------------------------------

    def _forward(self) -> str:
        lines = []
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards:
                call = "receive" if edge.recycles is None else "recycled"
                lines.append(f'{self._values.of_edge(edge).name} = run.{call}("{edge.name}", mb)')
        for span, steps in groupby(self._steps, self._flow.span):
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
            if again and step.is_left_out:
                return self._hold(step)
            return [*self._call(step, again), *self._add_up(step, again)]
        if isinstance(step, Move):
            return self._move(step.edge)
        assert isinstance(step, Open | Close)
        return self._window(step, is_forward=True)

    def _hold(self, segment: Segment) -> list[str]:
        """Keep what the backward of a segment needs that runs its forward by itself."""
        if not any(value.has_grad for value in self._flow.exports[segment]):
            return []
        return [self._with_args("run.hold", segment)]

    def _call(self, segment: Segment, again: int) -> list[str]:
        outs = self._flow.exports[segment]
        # What has no gradient has no backward, so nothing is kept for it; nor before it runs again.
        keeps = any(value.has_grad for value in outs) and segment.span == again
        which = "forward" if keeps else "compute"
        lines = [self._with_args(f"{assigned(v.name for v in outs)}run.{which}", segment)]
        if not again:
            lines += [f"run.add_loss({name})" for name in self._flow.loss_names(segment)]
        return lines

    def _with_args(self, head: str, segment: Segment) -> str:
        """A call with a segment and all that it is given."""
        with_grad, others = self._flow.args[segment]
        given, texts = tuple_of(v.name for v in with_grad), [v.text for v in others]
        end = ",))" if len(texts) == 1 else "))"
        return wrapped(f"{head}({segment.name}, mb, {given}, (", texts, end, INDENT)

    def _add_up(self, segment: Segment, again: int) -> list[str]:
        """Add what a segment made to the sums that edges take."""
        return [
            line
            for value in self._flow.exports[segment]
            for edge in self._flow.summands.get(value.name, ())
            if not again or self._flow.is_summed_in(edge, again)
            for line in self._sums.add(edge, f"{edge.tensor.name}_sum", value.name)
        ]

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
        for span, steps in groupby(reversed(self._steps), self._flow.span):
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
        outs = [value for value in self._flow.exports[segment] if value.has_grad]
        if not outs:
            return []
        loss = self._flow.loss_names(segment)
        grads = ["run.loss_grad" if v.name in loss else self._sum(v.name) for v in outs]
        with_grad, _ = self._flow.args[segment]
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
