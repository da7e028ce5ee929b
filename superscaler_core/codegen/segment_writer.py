"""SegmentWriter: segments as Python functions of tensors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from superscaler_core.codegen.statement import (
    Expression,
    Statement,
    freed,
    reads_of,
    tuple_expression,
)
from superscaler_core.codegen.text import function, wrapped
from superscaler_core.codegen.values import Value, Values, combined
from superscaler_core.graph.part import Part
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment
from superscaler_core.quoted import commented


class SegmentWriter:
    """Writes segments, with one statement per part.

    Args:
        made: the plan.
        values: the values of the device.
    """

    def __init__(self, made: Materialized, values: Values) -> None:
        self._made, self._values = made, values

    def function(self, segment: Segment, args: Sequence[Value], results: Sequence[Value]) -> str:
        """The function of a segment with arguments ``args`` and results ``results``."""
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

    def form(self, segment: Segment, args: Sequence[Value], results: Sequence[Value]) -> Hashable:
        """A key that is equal for segments whose functions do the same, whatever the names."""
        numbers: dict[str, int] = {}

        def number(value: Value) -> int:
            return numbers.setdefault(value.name, len(numbers))

        given = tuple(map(number, args))
        parts = []
        for part in segment.parts:
            sources = (self._values.source(part, i) for i in range(len(part.op.inputs)))
            read = tuple(tuple((number(v), v.box) for v in values) for values in sources)
            made = tuple(number(self._values.of_part(part, i)) for i in range(len(part.op.outputs)))
            parts.append((part.form, read, made))
        places = {part: place for place, part in enumerate(segment.parts)}
        sums = tuple((places[a], places[b]) for a, b in segment.products.items())
        return given, tuple(parts), sums, tuple(map(number, results))

    def _statement(self, part: Part, product: Part | None = None) -> Statement:
        """The statement of a part, or of a bias addition with its product in one call."""
        outs = tuple(self._values.of_part(part, i).name for i in range(len(part.outputs)))
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
        return combined(part.inputs[position].box, self._values.source(part, position))
