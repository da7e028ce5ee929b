"""LineWriter: the lines of a run of a stage as Python statements."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from superscaler_core.codegen.names import Names
from superscaler_core.codegen.statement import Statement
from superscaler_core.codegen.text import INDENT, assigned, index_text, tuple_of, wrapped
from superscaler_core.materialize.flow import DeviceFlow
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.program.value import Role, Value
from superscaler_core.quoted import literal, quoted
from superscaler_core.run.lines import (
    Add,
    BlockFunction,
    CallExpression,
    Expression,
    Fixed,
    Function,
    Join,
    Line,
    PartExpression,
    SumExpression,
    Tuple,
    Variable,
    variables_in,
)
from superscaler_core.schedules import ActionKind

FUNCTIONS = {
    ActionKind.RECYCLE: "forward",
    ActionKind.FORWARD: "forward",
    ActionKind.RECOMPUTE: "recompute",
    ActionKind.BACKWARD: "backward",
    ActionKind.INPUTS: "backward_inputs",
    ActionKind.WEIGHTS: "backward_weights",
    ActionKind.UPDATE: "update",
}
"""The suffix of the function of each run: ``stage0_backward_weights``."""

_LONG = frozenset({"forward", "compute", "hold"})
"""Calls that are broken between the items of their last argument if they are too long."""


def block_name(function: BlockFunction) -> str:
    """The name of a block's function, such as ``stage0_forward``."""
    return "_with_".join(f"stage{stage}_{FUNCTIONS[run]}" for stage, run in function.runs)


class LineWriter:
    """Writes the lines of one microbatch, whose number is the expression ``mb``, or of half of one.

    ``names`` are those of the device's file; each half has its own (``Names.of_half``).
    """

    def __init__(self, made: Materialized, names: Names, mb: str = "mb") -> None:
        self._made, self._names, self._mb = made, names, mb

    def add(self, flow: DeviceFlow) -> None:
        """Name the values of a stage: first all results, then what else is read."""
        for held in flow.all:
            name, of_value = held.tensor.name, held.value.name
            has_arrived = held.value.role is Role.ARRIVED
            self._names.of(held.value, f"{name}_{of_value}" if has_arrived else name)

    def name(self, variable: Variable) -> str:
        """The name of a variable; gradients and sums are named after their value."""
        if variable == Variable(variable.value):
            return self._names.of(variable.value, variable.value.name)
        return self._names.of(variable, variable.form.format(self._base(variable.value)))

    def _base(self, value: Value) -> str:
        if value.role is Role.OUT:
            return self._made.edge(value.name).tensor.name
        return self.name(Variable(value))

    def names(self, variables: Iterable[Variable]) -> tuple[str, ...]:
        """The names of some variables."""
        return tuple(map(self.name, variables))

    def reads(self, expression: Expression) -> tuple[str, ...]:
        """The names of the variables in an expression."""
        return self.names(variables_in(expression))

    # --- statements -----------------------------------------------------------------------------

    def statement(self, line: Line) -> Statement:
        """A line as a statement."""
        makes, value = self.names(line.makes), line.value
        if line.is_in_place and isinstance(value, Add):
            return Statement(f"{makes[0]} += {self.text(value.term)}", makes, self.reads(value))
        head = assigned(makes) if line.unpacks else f"{makes[0]} = " if makes else ""
        if isinstance(value, CallExpression) and value.of in _LONG:
            text = self._long(head, value)
        else:
            text = head + self.text(value) + self._comment(line.sub_transfers)
        return Statement(text, makes, self.reads(value))

    def _long(self, head: str, call: CallExpression) -> str:
        *given, last = call.args
        assert isinstance(last, Tuple), "it is the tuple of arguments without gradients"
        texts, end = [self.text(item) for item in last.items], "))"
        before = "".join(f"{self.text(arg)}, " for arg in given)
        end = ",))" if len(texts) == 1 else "))"
        return wrapped(f"{head}run.{call.of}({before}(", texts, end, INDENT)

    def _comment(self, sub_transfers: Sequence[Transfer]) -> str:
        """A comment about a move, for the reader of the file."""
        if len(sub_transfers) != 1:
            return f"  # {len(sub_transfers)} regions" if sub_transfers else ""
        steps = sub_transfers[0].plan(self._made.topology).path.steps
        kinds = " + ".join(step.kind for step in steps)
        return f"  # {kinds}: {sub_transfers[0].src.rvd} -> {sub_transfers[0].dst.rvd}"

    # --- expressions ----------------------------------------------------------------------------

    def text(self, expression: Expression) -> str:
        """An expression as Python text."""
        match expression:
            case Variable():
                return self.name(expression)
            case Fixed():
                return self._mb if expression is Fixed.MICROBATCH else expression.value
            case Function(name):
                return name
            case BlockFunction():
                return block_name(expression)
            case PartExpression(of, box, within):
                return self.name(of) + index_text(box, within)
            case Add(now, term):
                return f"{self.text(now)} + {self.text(term)}"
            case SumExpression(terms):
                return f"({' + '.join(map(self.text, terms))})"
            case Join(box, pieces):
                given = ", ".join(f'({self.name(each)}, "{part}")' for each, part in pieces)
                return f'ops.join("{box}", [{given}])'
            case Tuple(items):
                return tuple_of(map(self.text, items))
            case CallExpression():
                return self._call(expression)
            case str():
                return quoted(expression)
            case int():
                return str(expression)
        return literal(list(expression))

    def _call(self, call: CallExpression) -> str:
        args = [*map(self.text, call.args), *(f"{k}={literal(v)}" for k, v in call.options)]
        if isinstance(call.of, BlockFunction):
            return f"{block_name(call.of)}({', '.join(['run', *args])})"
        return f"run.{call.of}({', '.join(args)})"
