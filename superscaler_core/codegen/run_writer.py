"""RunWriter: what one microbatch, or half of one, does in the runs of a stage on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from superscaler_core.codegen.names import Names
from superscaler_core.codegen.statement import (
    NONE,
    Expression,
    Statement,
    tuple_expression,
)
from superscaler_core.codegen.text import INDENT, assigned, index_text, wrapped
from superscaler_core.codegen.totals import Totals
from superscaler_core.codegen.variables import Variable, Variables, combined
from superscaler_core.plan import Device
from superscaler_core.program.edges import Edge
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.program.transfer import Transfer
from superscaler_core.program.value import Value
from superscaler_core.program.verb import ALONE, Phase, Verb
from superscaler_core.quoted import quoted
from superscaler_core.schedules import ActionKind

_BACK = {Verb.BACKWARD: "backward", Verb.BACKWARD_INPUTS: "backward_inputs"}
"""Calls of generated code for the gradients of a segment's inputs."""


class RunWriter:
    """Writes the statements of instructions, and of transfers from and to other stages.

    Args:
        made: the plan.
        stage, device: the stage and the device.
        names: the names of the device's file; each half has its own (``Names.of_half``).
        mb: the expression of the microbatch's number.

    Attributes:
        variables, flow: the variables of the device, and what the stage passes on.
    """

    def __init__(
        self, made: Materialized, stage: int, device: Device, names: Names, mb: str
    ) -> None:
        self._made, self._stage, self._device = made, stage, device
        self._names, self._mb = names, mb
        self._grads = Totals(names)
        self._sums = Totals(names)
        self.flow = made.stages[stage].flow(device)
        self.variables = Variables(names, mb)
        self.variables.add(self.flow)

    # --- around a run ---------------------------------------------------------------------------

    def arriving(self) -> list[Statement]:
        """Receive what a forward reads from other stages."""
        lines = []
        for edge in self.flow.arriving:
            which = "receive" if edge.recycles is None else "recycled"
            call = Expression(f"run.{which}({quoted(edge.name)}, {self._mb})")
            lines.append(Statement.assign(self._arrived(edge), call))
        return lines

    def leaving(self) -> list[Statement]:
        """Send what a forward computes for other stages."""
        lines = []
        for edge in self.flow.leaving:
            shard = self._packed(edge)
            which = "result" if edge.result else "recycle" if edge.recycles else "send"
            call = f"run.{which}({quoted(edge.name)}, {self._mb}, {shard})"
            lines.append(Statement.call(call, shard))
        return lines

    def arriving_back(self) -> list[Statement]:
        """Receive the gradients that a backward begins with."""
        self._grads = Totals(self._names)
        lines = []
        for edge in self.flow.leaving:
            if edge.backward:
                grad = self._grad_name(edge, edge.tensor.name)
                call = Expression(f"run.receive_grad({quoted(edge.name)}, {self._mb})")
                lines.append(Statement.assign(grad, call))
                lines += self._unpack_grad(edge, grad)
        return lines

    def leaving_back(self) -> list[Statement]:
        """Send the gradients that a backward computes for other stages."""
        lines = []
        for edge in self.flow.arriving:
            if edge.backward:
                given = self._sum(self._arrived(edge))
                call = f"run.send_grad({quoted(edge.name)}, {self._mb}, {given})"
                lines.append(Statement.call(call, given))
        return lines

    def _arrived(self, edge: Edge) -> str:
        """The variable of what an edge brings."""
        return self.variables.of(self.flow.arrived(edge)).name

    def _sent(self, edge: Edge) -> list[Variable]:
        """The variables that an edge moves."""
        return self.variables.all(self.flow.sent[edge])

    def _ends(self, segment: Segment) -> tuple[list[Variable], list[Variable], list[Variable]]:
        """The inputs with gradients, the other inputs, and the results of a segment."""
        mine = self.flow.of[segment.name]
        all_of = self.variables.all
        return all_of(mine.inputs), all_of(mine.others), all_of(mine.results)

    # --- instructions ---------------------------------------------------------------------------

    def statements(self, instruction: StepInstruction, run: ActionKind) -> list[Statement]:
        """The statements of an instruction in a run of the stage."""
        kind, what = instruction.kind, self._subject(instruction)
        match kind:
            case Verb.FORWARD | Verb.COMPUTE:
                again = what.span if run is not ActionKind.FORWARD else 0
                return [*self._call(what, kind, again), *self._add_up(what, again)]
            case Verb.HOLD:
                return [self._with_args("run.hold", what)]
            case Verb.BACKWARD | Verb.BACKWARD_INPUTS:
                return self._call_back(what, kind)
            case Verb.RERUN:
                return [Statement(f"run.rerun({what.name}, {self._mb})")]
            case Verb.BACKWARD_WEIGHTS:
                return [Statement(f"run.backward_weights({what.name}, {self._mb})")]
            case Verb.OUT | Verb.IN:
                prefix = prefix_of(instruction.phase)
                return [Statement(f"run.{prefix}swap_{kind}({what.name}, {self._mb})")]
            case Verb.KEEP:
                return self._keep(what)
            case Verb.RESUME:
                return self._resume(what)
            case Verb.MOVE:
                return self._move(what, instruction.phase)
            case Verb.MOVE_BACK:
                return self._move_back(what, instruction.phase)
            case _:
                raise AssertionError(f"{instruction} is of weights")

    def _subject(self, instruction: StepInstruction) -> Any:
        """What an instruction names on this device; the number of a span."""
        if instruction.kind in (Verb.KEEP, Verb.RESUME):
            return int(instruction.name.rpartition("_span")[2])
        if instruction.kind in ALONE:
            return self._made.segment(instruction.name, self._device)
        return self._made.subject(instruction)

    def _keep(self, span: int) -> list[Statement]:
        entering = self.variables.all(self.flow.entering(span))
        values = tuple_expression(Expression.of(v.name) for v in entering)
        call = f'run.keep("stage{self._stage}_span{span}", {self._mb}, {values})'
        return [Statement.call(call, values)]

    def _resume(self, span: int) -> list[Statement]:
        """Begin the rerun of a span; its segments now keep what their backward needs."""
        names = tuple(v.name for v in self.variables.all(self.flow.entering(span)))
        self._sums = Totals(self._names)
        kept = f'run.kept("stage{self._stage}_span{span}", {self._mb})'
        return [Statement(assigned(names) + kept, names)]

    def _call(self, segment: Segment, kind: Verb, again: int) -> list[Statement]:
        mine, names = self.flow.of[segment.name], self._result_names(segment)
        which = "forward" if kind is Verb.FORWARD else "compute"
        lines = [self._with_args(f"run.{which}", segment, tuple(names.values()))]
        for value in () if again else mine.losses:
            lines.append(Statement(f"run.add_loss({names[value]})", reads=(names[value],)))
        for buffer, value in () if again else mine.states.items():
            call = f"run.keep_state({quoted(buffer)}, {names[value]})"
            lines.append(Statement(call, reads=(names[value],)))
        return lines

    def _result_names(self, segment: Segment) -> dict[Value, str]:
        """The variables of a segment's results."""
        *_, results = self._ends(segment)
        return {variable.value: variable.name for variable in results}

    def _with_args(self, call: str, segment: Segment, outs: tuple[str, ...] = ()) -> Statement:
        """A call with a segment and all its arguments."""
        with_grad, others, _ = self._ends(segment)
        given = tuple_expression(Expression.of(v.name) for v in with_grad)
        texts = [v.text for v in others]
        reads = (*given.reads, *(v.name for v in others if v.text == v.name))
        head, end = f"{assigned(outs)}{call}", ",))" if len(texts) == 1 else "))"
        text = wrapped(f"{head}({segment.name}, {self._mb}, {given}, (", texts, end, INDENT)
        return Statement(text, outs, reads)

    def _add_up(self, segment: Segment, again: int) -> list[Statement]:
        """Add a segment's results to the sums that edges move."""
        return [
            line
            for value, name in self._result_names(segment).items()
            for edge in self.flow.summands.get(value, ())
            if not again or self.flow.is_summed_in(edge, again)
            for line in self._sums.add(edge, f"{edge.tensor.name}_sum", Expression.of(name))
        ]

    def _move(self, edge: Edge, phase: Phase) -> list[Statement]:
        if phase is Phase.WAIT:
            call, comment = Expression(f"run.wait_move({quoted(edge.name)})"), ""
        else:
            shard, comment = self._packed(edge), self._comment(edge.forward)
            call = Expression(
                f"run.{prefix_of(phase)}move({quoted(edge.name)}, {shard})", shard.reads
            )
            if phase is Phase.WHOLE and len(edge.forward) == 1 and edge.forward[0].is_idle:
                call, comment = shard, ""
        if phase is Phase.START or self._device not in edge.dst.shards:
            return [Statement.call(f"{call}{comment}", call)]
        return [Statement.assign(self._arrived(edge), call, comment)]

    def _comment(self, legs: Sequence[Transfer]) -> str:
        """A comment about a move, for the reader of the file."""
        if len(legs) > 1:
            return f"  # {len(legs)} regions"
        steps = legs[0].plan(self._made.topology).path.steps
        kinds = " + ".join(step.kind for step in steps)
        return f"  # {kinds}: {legs[0].src.rvd} -> {legs[0].dst.rvd}"

    # --- backward -------------------------------------------------------------------------------

    def _grad_name(self, source: Segment | Edge, name: str) -> str:
        """The variable of the gradient of a value that comes from a segment or an edge."""
        return self._names.of((source, name), f"g_{name}")

    def _sum(self, name: str) -> Expression:
        """The gradient of a value, summed over its readers."""
        return self._grads.of(name) or NONE

    def _call_back(self, segment: Segment, kind: Verb) -> list[Statement]:
        with_grad, _, outs = self._ends(segment)
        losses = self.flow.of[segment.name].losses
        grads = tuple_expression(
            Expression("run.loss_grad") if v.value in losses else self._sum(v.name)
            for v in outs if v.has_grad
        )  # fmt: skip
        results = tuple(self._grad_name(segment, value.name) for value in with_grad)
        call = f"run.{_BACK[kind]}({segment.name}, {self._mb}, {grads})"
        lines = [Statement(assigned(results) + call, results, grads.reads)]
        for value, result in zip(with_grad, results, strict=True):
            lines += self._add_grad(value.name, Expression.of(result))
        return lines

    def _move_back(self, edge: Edge, phase: Phase) -> list[Statement]:
        if phase is Phase.WAIT:
            call, comment = Expression(f"run.wait_move_back({quoted(edge.name)})"), ""
        else:
            grad = NONE
            if self._device in edge.dst.shards:
                grad = self._sum(self._arrived(edge))
            comment = self._comment(edge.backward)
            call = Expression(
                f"run.{prefix_of(phase)}move_back({quoted(edge.name)}, {grad})", grad.reads
            )
            is_idle = len(edge.backward) == 1 and edge.backward[0].is_idle
            if phase is Phase.WHOLE and is_idle and grad is not NONE:
                call, comment = grad, ""
        if phase is Phase.START or self._device not in edge.src.shards:
            return [Statement.call(f"{call}{comment}", call)]
        name = self._grad_name(edge, edge.tensor.name)
        return [Statement.assign(name, call, comment), *self._unpack_grad(edge, name)]

    # --- edges ----------------------------------------------------------------------------------

    def _packed(self, edge: Edge) -> Expression:
        """This device's shard of an edge."""
        if self._device not in edge.src.shards:
            return NONE
        box = edge.src.shards[self._device].box
        return self._sums.of(edge) or combined(box, self._sent(edge))

    def _unpack_grad(self, edge: Edge, grad: str) -> list[Statement]:
        """Pass the gradient of a shard on to the values that form the shard."""
        box = edge.src.shards[self._device].box
        return [
            line
            for value in self._sent(edge)
            for line in self._add_grad(
                value.name, Expression(grad + index_text(value.box, box), (grad,))
            )
        ]

    def _add_grad(self, name: str, grad: Expression) -> list[Statement]:
        """Add a gradient of a value that several steps may read."""
        return self._grads.add(name, f"g_{name}_sum", grad)


def prefix_of(phase: Phase) -> str:
    """The prefix of calls that are one phase of a communication."""
    return f"{phase}_" if phase else ""
