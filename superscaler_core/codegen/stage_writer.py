"""StageWriter: the functions of one stage on one device, as Python text."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from superscaler_core.codegen.flow import Flow
from superscaler_core.codegen.names import Names
from superscaler_core.codegen.segment_writer import SegmentWriter
from superscaler_core.codegen.statement import (
    NONE,
    Expression,
    Statement,
    freed,
    tuple_expression,
)
from superscaler_core.codegen.text import INDENT, assigned, function, index_text, wrapped
from superscaler_core.codegen.totals import Totals
from superscaler_core.codegen.values import Value, Values, combined
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.instruction import Phase, StepInstruction, Verb
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.transfer import Transfer
from superscaler_core.schedules import ActionKind

_CALLS = {
    Verb.FETCH: "fetch",
    Verb.GATHER: "gather",
    Verb.RELEASE: "drop",
    Verb.REDUCE: "reduce",
    Verb.LOSS: "total_loss",
    Verb.UPDATE: "update",
}
"""Calls of generated code about weights."""

_BACK = {Verb.BACKWARD: "backward", Verb.BACKWARD_INPUTS: "backward_inputs"}
"""Calls of generated code for the gradients of a segment's inputs."""

_HALVES = {ActionKind.RECOMPUTE: "recompute", ActionKind.WEIGHTS: "backward_weights"}
"""Runs without transfers from or to other stages, and the suffixes of their functions."""

_BACKWARDS = {ActionKind.BACKWARD: "backward", ActionKind.INPUTS: "backward_inputs"}
"""Runs that transfer gradients, and the suffixes of their functions."""

STAGE_FUNCTIONS = {
    ActionKind.TURN: "forward", ActionKind.FORWARD: "forward", **_HALVES, **_BACKWARDS
}  # fmt: skip
"""The suffix of the function of each run: ``stage0_backward_weights``."""


def weights_call(made: Materialized, instruction: StepInstruction, device: Device) -> str:
    """The call that fetches, reduces or updates weights, or one phase of that call."""
    names: list[str] = []
    match instruction.kind:
        case Verb.LOSS:
            return f"run.{_CALLS[instruction.kind]}()"
        case Verb.UPDATE:
            storage = made.weights.storage
            names = [t.name for t in instruction.what if device in storage[t].shards]
        case _:
            names = [
                use.name
                for use in made.uses_in(instruction.what)
                if device in use.storage.shards or device in use.side.shards
            ]
    call = f"run.{_prefix(instruction.phase)}{_CALLS[instruction.kind]}"
    return f"{call}([{', '.join(map(repr, names))}])"


class StageWriter:
    """Writes the functions of one device in one stage: each instruction becomes statements.

    Args:
        made: the plan.
        stage, device: the stage and the device.
        names: the names of the device's file.
    """

    def __init__(self, made: Materialized, stage: int, device: Device, names: Names) -> None:
        self._made, self._stage, self._device = made, stage, device
        self._names = names
        self._grads = Totals(names)
        self._sums = Totals(names)
        self._values = Values(made, device, names)
        self._flow = Flow(made, stage, device, self._values)
        self._segments = SegmentWriter(made, self._values)

    # --- functions of the file ------------------------------------------------------------------

    def functions(self) -> list[str]:
        """The segments, then one function for each run of the stage in the schedule."""
        return [*map(self.segment_function, self.segments), *self.stage_functions()]

    @property
    def segments(self) -> Sequence[Segment]:
        """The segments of the stage, in order."""
        return self._flow.segments

    def segment_function(self, segment: Segment) -> str:
        """The function of a segment."""
        return self._segments.function(segment, *self._ends(segment))

    def segment_form(self, segment: Segment) -> Hashable:
        """A key that is equal for segments whose functions do the same, whatever their names."""
        return self._segments.form(segment, *self._ends(segment))

    def _ends(self, segment: Segment) -> tuple[list[Value], list[Value]]:
        """The arguments and the results of a segment."""
        with_grad, others = self._flow.args[segment]
        return with_grad + others, self._flow.exports[segment]

    def stage_functions(self) -> list[str]:
        """One function for each run of the stage in the schedule."""
        texts = [self._forward()]
        for run in self._made.stages[self._stage].order:
            if run in _BACKWARDS:
                texts.append(self._backward(run))
            elif run in _HALVES:
                texts.append(self._function(run, self._body(run)))
        return texts

    def _function(self, run: ActionKind, lines: list[Statement]) -> str:
        return function(f"def stage{self._stage}_{STAGE_FUNCTIONS[run]}(run, mb):", freed(lines))

    @property
    def recomputed(self) -> list[str]:
        """The segments whose backward recomputes their forward."""
        return [segment.name for segment in self._flow.segments if segment.recompute]

    @property
    def swapped(self) -> list[str]:
        """The segments whose kept values are swapped to the host."""
        return [segment.name for segment in self._flow.segments if segment.swap]

    # --- edges ----------------------------------------------------------------------------------

    def _packed(self, edge: Edge) -> Expression:
        """This device's shard of an edge."""
        if self._device not in edge.src.shards:
            return NONE
        box = edge.src.shards[self._device].box
        return self._sums.of(edge) or combined(box, self._values.edge_source(edge))

    def _unpack_grad(self, edge: Edge, grad: str) -> list[Statement]:
        """Pass the gradient of a shard on to the values that form the shard."""
        box = edge.src.shards[self._device].box
        return [
            line
            for value in self._values.edge_source(edge)
            for line in self._add_grad(
                value.name, Expression(grad + index_text(value.box, box), (grad,))
            )
        ]

    def _add_grad(self, name: str, grad: Expression) -> list[Statement]:
        """Add a gradient of a value that several steps may read."""
        return self._grads.add(name, f"g_{name}_sum", grad)

    # --- the stage ------------------------------------------------------------------------------

    def _forward(self) -> str:
        lines = []
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards:
                which = "receive" if edge.recycles is None else "recycled"
                call = Expression(f'run.{which}("{edge.name}", mb)')
                lines.append(Statement.assign(self._values.of_edge(edge).name, call))
        lines += self._body(ActionKind.FORWARD)
        for edge in self._made.crossing_from(self._stage):
            if self._device in edge.src.shards:
                shard = self._packed(edge)
                which = "result" if edge.result else "recycle" if edge.recycles else "send"
                lines.append(Statement.call(f'run.{which}("{edge.name}", mb, {shard})', shard))
        return self._function(ActionKind.FORWARD, lines)

    def _body(self, run: ActionKind) -> list[Statement]:
        return [
            line
            for instruction in self._made.step_program.on(self._device, self._stage, run)
            for line in self._if_for(instruction, self._statements(instruction, run))
        ]

    def _if_for(self, instruction: StepInstruction, lines: list[Statement]) -> Iterator[Statement]:
        """The statements of an instruction, which may be for one microbatch only."""
        if instruction.microbatch is None:
            yield from lines
            return
        yield Statement(f"if mb == {instruction.microbatch}:")
        yield from (replace(line, text=INDENT + line.text) for line in lines)

    def _statements(self, instruction: StepInstruction, run: ActionKind) -> list[Statement]:
        """The statements of an instruction in a run of the stage."""
        kind, what = instruction.kind, instruction.what
        match kind:
            case Verb.FORWARD | Verb.COMPUTE:
                again = what.span if run is not ActionKind.FORWARD else 0
                return [*self._call(what, kind, again), *self._add_up(what, again)]
            case Verb.HOLD:
                return [self._with_args("run.hold", what)]
            case Verb.BACKWARD | Verb.BACKWARD_INPUTS:
                return self._call_back(what, kind)
            case Verb.RERUN:
                return [Statement(f"run.rerun({what.name}, mb)")]
            case Verb.BACKWARD_WEIGHTS:
                return [Statement(f"run.backward_weights({what.name}, mb)")]
            case Verb.OUT | Verb.IN:
                prefix = _prefix(instruction.phase)
                return [Statement(f"run.{prefix}swap_{kind}({what.name}, mb)")]
            case Verb.KEEP:
                return self._keep(what)
            case Verb.RESUME:
                return self._resume(what)
            case Verb.MOVE:
                return self._move(what, instruction.phase)
            case Verb.MOVE_BACK:
                return self._move_back(what, instruction.phase)
            case _:
                return [Statement(weights_call(self._made, instruction, self._device))]

    def _keep(self, span: int) -> list[Statement]:
        values = tuple_expression(Expression.of(v.name) for v in self._flow.entering(span))
        call = f'run.keep("stage{self._stage}_span{span}", mb, {values})'
        return [Statement.call(call, values)]

    def _resume(self, span: int) -> list[Statement]:
        """Begin the rerun of a span; its segments now keep what their backward needs."""
        names = tuple(v.name for v in self._flow.entering(span))
        self._sums = Totals(self._names)
        kept = f'run.kept("stage{self._stage}_span{span}", mb)'
        return [Statement(assigned(names) + kept, names)]

    def _call(self, segment: Segment, kind: Verb, again: int) -> list[Statement]:
        outs = tuple(value.name for value in self._flow.exports[segment])
        which = "forward" if kind is Verb.FORWARD else "compute"
        lines = [self._with_args(f"run.{which}", segment, outs)]
        for name in () if again else self._flow.loss_names(segment):
            lines.append(Statement(f"run.add_loss({name})", reads=(name,)))
        for buffer, name in () if again else self._flow.state_names(segment).items():
            lines.append(Statement(f'run.keep_state("{buffer}", {name})', reads=(name,)))
        return lines

    def _with_args(self, call: str, segment: Segment, outs: tuple[str, ...] = ()) -> Statement:
        """A call with a segment and all its arguments."""
        with_grad, others = self._flow.args[segment]
        given = tuple_expression(Expression.of(v.name) for v in with_grad)
        texts = [v.text for v in others]
        reads = (*given.reads, *(v.name for v in others if v.text == v.name))
        head, end = f"{assigned(outs)}{call}", ",))" if len(texts) == 1 else "))"
        text = wrapped(f"{head}({segment.name}, mb, {given}, (", texts, end, INDENT)
        return Statement(text, outs, reads)

    def _add_up(self, segment: Segment, again: int) -> list[Statement]:
        """Add a segment's results to the sums that edges move."""
        return [
            line
            for value in self._flow.exports[segment]
            for edge in self._flow.summands.get(value.name, ())
            if not again or self._flow.is_summed_in(edge, again)
            for line in self._sums.add(edge, f"{edge.tensor.name}_sum", Expression.of(value.name))
        ]

    def _move(self, edge: Edge, phase: Phase) -> list[Statement]:
        if phase is Phase.WAIT:
            call, comment = Expression(f'run.wait_move("{edge.name}")'), ""
        else:
            shard, comment = self._packed(edge), self._comment(edge.forward)
            call = Expression(f'run.{_prefix(phase)}move("{edge.name}", {shard})', shard.reads)
            if phase is Phase.WHOLE and len(edge.forward) == 1 and edge.forward[0].is_idle:
                call, comment = shard, ""
        if phase is Phase.START or self._device not in edge.dst.shards:
            return [Statement.call(f"{call}{comment}", call)]
        return [Statement.assign(self._values.of_edge(edge).name, call, comment)]

    def _comment(self, legs: Sequence[Transfer]) -> str:
        """A comment about a move, for the reader of the file."""
        if len(legs) > 1:
            return f"  # {len(legs)} regions"
        steps = legs[0].plan(self._made.topology).path.steps
        kinds = " + ".join(step.kind for step in steps)
        return f"  # {kinds}: {legs[0].src.rvd} -> {legs[0].dst.rvd}"

    # --- backward -------------------------------------------------------------------------------

    def _backward(self, run: ActionKind) -> str:
        self._grads = Totals(self._names)
        lines = []
        for edge in self._made.crossing_from(self._stage):
            if self._device in edge.src.shards and edge.backward:
                grad = self._grad_name(edge, edge.tensor.name)
                call = Expression(f'run.receive_grad("{edge.name}", mb)')
                lines.append(Statement.assign(grad, call))
                lines += self._unpack_grad(edge, grad)
        lines += self._body(run)
        for edge in self._made.crossing_to(self._stage):
            if self._device in edge.dst.shards and edge.backward:
                given = self._sum(self._values.of_edge(edge).name)
                lines.append(Statement.call(f'run.send_grad("{edge.name}", mb, {given})', given))
        return self._function(run, lines)

    def _grad_name(self, source: Segment | Edge, name: str) -> str:
        """The variable of the gradient of a value that comes from a segment or an edge."""
        return self._names.of((source, name), f"g_{name}")

    def _sum(self, name: str) -> Expression:
        """The gradient of a value, summed over its readers."""
        return self._grads.of(name) or NONE

    def _call_back(self, segment: Segment, kind: Verb) -> list[Statement]:
        outs = [value for value in self._flow.exports[segment] if value.has_grad]
        loss = self._flow.loss_names(segment)
        grads = tuple_expression(
            Expression("run.loss_grad") if v.name in loss else self._sum(v.name) for v in outs
        )
        with_grad, _ = self._flow.args[segment]
        results = tuple(self._grad_name(segment, value.name) for value in with_grad)
        call = f"run.{_BACK[kind]}({segment.name}, mb, {grads})"
        lines = [Statement(assigned(results) + call, results, grads.reads)]
        for value, result in zip(with_grad, results, strict=True):
            lines += self._add_grad(value.name, Expression.of(result))
        return lines

    def _move_back(self, edge: Edge, phase: Phase) -> list[Statement]:
        if phase is Phase.WAIT:
            call, comment = Expression(f'run.wait_move_back("{edge.name}")'), ""
        else:
            grad = NONE
            if self._device in edge.dst.shards:
                grad = self._sum(self._values.of_edge(edge).name)
            comment = self._comment(edge.backward)
            call = Expression(f'run.{_prefix(phase)}move_back("{edge.name}", {grad})', grad.reads)
            is_idle = len(edge.backward) == 1 and edge.backward[0].is_idle
            if phase is Phase.WHOLE and is_idle and grad is not NONE:
                call, comment = grad, ""
        if phase is Phase.START or self._device not in edge.src.shards:
            return [Statement.call(f"{call}{comment}", call)]
        name = self._grad_name(edge, edge.tensor.name)
        return [Statement.assign(name, call, comment), *self._unpack_grad(edge, name)]


def _prefix(phase: Phase) -> str:
    """The prefix of calls that are one phase of a communication."""
    return f"{phase}_" if phase else ""
