"""SegmentWriter: segments as Python functions of tensors."""

from __future__ import annotations

from collections.abc import Hashable

from superscaler_core.codegen.statement import (
    Expression,
    Statement,
    freed,
    reads_of,
    tuple_expression,
)
from superscaler_core.codegen.text import function, wrapped
from superscaler_core.codegen.variables import Variable, Variables, combined
from superscaler_core.graph.part import Part
from superscaler_core.program.flow import Flow
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.quoted import commented


class SegmentWriter:
    """Writes segments, with one statement per part.

    Args:
        made: the plan.
        flow: the values of the stage on the device.
        variables: the variables of the device.
    """

    def __init__(self, made: Materialized, flow: Flow, variables: Variables) -> None:
        self._made, self._flow, self._variables = made, flow, variables

    def function(self, segment: Segment) -> str:
        """The function of a segment."""
        args, results = self._ends(segment)
        names = ["rng", *(value.name for value in args)]
        lines: list[Statement] = []
        module = None
        sums, joined = segment.products, set(segment.products.values())
        for part in segment.parts:
            if part in joined:
                continue
            if part.op.module != module:
                module = part.op.module
                lines.append(
                    Statement(f"# {commented(module or self._made.plan.graph.name)}", is_last=True)
                )
            lines.append(self._statement(part, sums.get(part)))
        value = tuple_expression(Expression.of(result.name) for result in results)
        lines.append(Statement(f"return {value}", reads=value.reads, is_last=True))
        return function(wrapped(f"def {segment.name}(", names, "):"), freed(lines))

    def _ends(self, segment: Segment) -> tuple[list[Variable], list[Variable]]:
        """The arguments and the results of a segment."""
        mine = self._flow.of[segment.name]
        return self._variables.all(mine.args), self._variables.all(mine.results)

    def form(self, segment: Segment) -> Hashable:
        """A key that is equal for segments whose functions do the same, whatever the names."""
        args, results = self._ends(segment)
        numbers: dict[str, int] = {}

        def number(value: Variable) -> int:
            return numbers.setdefault(value.name, len(numbers))

        given = tuple(map(number, args))
        parts = []
        for part in segment.parts:
            sources = (self._read(part, i) for i in range(len(part.op.inputs)))
            read = tuple(tuple((number(v), v.box) for v in values) for values in sources)
            made = tuple(map(number, self._made_by(part)))
            parts.append((part.form, read, made))
        places = {part: place for place, part in enumerate(segment.parts)}
        sums = tuple((places[a], places[b]) for a, b in segment.products.items())
        return given, tuple(parts), sums, tuple(map(number, results))

    def _statement(self, part: Part, product: Part | None = None) -> Statement:
        """The statement of a part, or of a bias addition with its product in one call."""
        outs = tuple(variable.name for variable in self._made_by(part))
        call = self._call(product or part, None if product is None else self._bias(part))
        return Statement(f"{', '.join(outs)} = {call}", outs, call.reads)

    def _bias(self, part: Part) -> Expression:
        """The bias that a part adds, in the dtype of the sum."""
        bias, dtype = self._expression(part, 1), part.op.outputs[0].dtype
        if part.op.inputs[1].dtype == dtype:
            return bias
        return Expression(f"({bias.text}).to(torch.{dtype})", bias.reads)

    def _call(self, part: Part, bias: Expression | None) -> Expression:
        operands = [self._expression(part, position) for position in range(len(part.inputs))]
        texts, seed = [operand.text for operand in operands], f"rng + {part.op.seed}"
        given = operands if bias is None else [*operands, bias]
        return Expression(part.call(texts, seed, bias.text if bias else None), reads_of(given))

    def _expression(self, part: Part, position: int) -> Expression:
        """The expression of an operand of a part."""
        return combined(part.inputs[position].box, self._read(part, position))

    def _read(self, part: Part, position: int) -> list[Variable]:
        """The variables that form an operand of a part."""
        return self._variables.all(self._flow.read(part, position))

    def _made_by(self, part: Part) -> list[Variable]:
        """The variables of a part's results."""
        return [self._variables.of(self._flow.result(part, i)) for i in range(len(part.op.outputs))]
