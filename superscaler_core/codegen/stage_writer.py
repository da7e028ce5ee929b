"""StageWriter: the functions of one stage on one device, as Python text."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.codegen.flow import Flow
from superscaler_core.codegen.free import freed
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segment_writer import SegmentWriter
from superscaler_core.codegen.text import INDENT, assigned, function, index_text, tuple_of, wrapped
from superscaler_core.codegen.totals import Totals
from superscaler_core.codegen.values import Values, combined
from superscaler_core.plan import Device
from superscaler_core.plan.savings import Window
from superscaler_core.program.edges import Edge
from superscaler_core.program.instruction import StepInstruction, Verb
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.transfer import Transfer

_CALLS = {Verb.GATHER: "gather", Verb.RELEASE: "drop", Verb.REDUCE: "reduce"}
"""What generated code calls at a window."""


class StageWriter:
    """Writes what one device does in one stage: every instruction of it becomes statements.

    Args:
        made: the plan.
        stage, device: which.
        names: of the device's file.
    """

    def __init__(self, made: Materialized, stage: int, device: Device, names: Names) -> None:
        self._made, self._stage, self._device = made, stage, device
        self._program = made.stages[stage]
        self._names = names
        self._grads = Totals(names)
        self._sums = Totals(names)
        self._values = Values(made, device, names)
        self._flow = Flow(made, stage, device, self._values)

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

    # --- the stage ------------------------------------------------------------------------------

    def _forward(self) -> str:
        lines = []
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards:
                call = "receive" if edge.recycles is None else "recycled"
                lines.append(f'{self._values.of_edge(edge).name} = run.{call}("{edge.name}", mb)')
        lines += self._body("F")
        for edge in self._made.crossing_from(self._stage):
            if self._device in edge.src.shards:
                call = "send" if edge.recycles is None else "recycle"
                lines.append(f'run.{call}("{edge.name}", mb, {self._packed(edge)})')
        return function(f"def stage{self._stage}_forward(run, mb):", freed(lines))

    def _body(self, run: str) -> list[str]:
        return [
            line
            for instruction in self._program.on(self._device, run)
            for line in self._statements(instruction, run)
        ]

    def _statements(self, instruction: StepInstruction, run: str) -> list[str]:
        """What an instruction becomes in the forward ("F") or the backward ("B")."""
        kind, what = instruction.kind, instruction.what
        match kind:
            case Verb.FORWARD | Verb.COMPUTE:
                again = what.span if run == "B" else 0
                return [*self._call(what, kind, again), *self._add_up(what, again)]
            case Verb.HOLD:
                return [self._with_args("run.hold", what)]
            case Verb.BACKWARD:
                return self._call_back(what)
            case Verb.KEEP:
                return self._keep(what)
            case Verb.RESUME:
                return self._resume(what)
            case Verb.MOVE:
                return self._move(what)
            case Verb.MOVE_BACK:
                return self._move_back(what)
            case Verb.GATHER | Verb.RELEASE | Verb.REDUCE:
                return self._window(what, kind)

    def _keep(self, span: int) -> list[str]:
        values = tuple_of(v.name for v in self._flow.entering(span))
        return [f'run.keep("stage{self._stage}_span{span}", mb, {values})']

    def _resume(self, span: int) -> list[str]:
        """Begin to run a span again, which now keeps what its backward needs."""
        values = self._flow.entering(span)
        self._sums = Totals(self._names)
        kept = f'run.kept("stage{self._stage}_span{span}", mb)'
        return [f"{assigned(v.name for v in values)}{kept}"]

    def _call(self, segment: Segment, kind: Verb, again: int) -> list[str]:
        outs = assigned(value.name for value in self._flow.exports[segment])
        which = "forward" if kind is Verb.FORWARD else "compute"
        lines = [self._with_args(f"{outs}run.{which}", segment)]
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

    def _window(self, window: Window, kind: Verb) -> list[str]:
        names = [
            use.name
            for use in self._made.uses_of.get(window, ())
            if self._device in use.storage.shards or self._device in use.side.shards
        ]
        return [f"run.{_CALLS[kind]}([{', '.join(map(repr, names))}])"]

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
        lines += self._body("B")
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards and edge.backward:
                grad = self._sum(self._values.of_edge(edge).name)
                lines.append(f'run.send_grad("{edge.name}", mb, {grad})')
        return function(f"def stage{self._stage}_backward(run, mb):", freed(lines))

    def _grad_name(self, source: Segment | Edge, name: str) -> str:
        """The variable of the gradient of a value that comes from a segment or an edge."""
        return self._names.of((source, name), f"g_{name}")

    def _sum(self, name: str) -> str:
        """The gradient of a value, from all who read it."""
        return self._grads.of(name) or "None"

    def _call_back(self, segment: Segment) -> list[str]:
        outs = [value for value in self._flow.exports[segment] if value.has_grad]
        loss = self._flow.loss_names(segment)
        grads = ["run.loss_grad" if v.name in loss else self._sum(v.name) for v in outs]
        with_grad, _ = self._flow.args[segment]
        results = [self._grad_name(segment, value.name) for value in with_grad]
        lines = [f"{assigned(results)}run.backward({segment.name}, mb, {tuple_of(grads)})"]
        for value, result in zip(with_grad, results, strict=True):
            lines += self._add_grad(value.name, result)
        return lines

    def _move_back(self, edge: Edge) -> list[str]:
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
