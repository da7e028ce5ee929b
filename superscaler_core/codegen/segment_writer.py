"""SegmentWriter: segments as Python functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.codegen.free import freed
from superscaler_core.codegen.text import function, tuple_of, wrapped
from superscaler_core.codegen.values import Value, Values, combined
from superscaler_core.graph.part import Part
from superscaler_core.program.materialized import Materialized
from superscaler_core.program.segments import Segment


class SegmentWriter:
    """Writes segments, a statement a part.

    Args:
        made: the plan.
        values: of the device.
    """

    def __init__(self, made: Materialized, values: Values) -> None:
        self._made, self._values = made, values

    def function(self, segment: Segment, args: Sequence[Value], results: Sequence[Value]) -> str:
        """The function of a segment that is given ``args`` and returns ``results``."""
        names = ["rng", *(value.name for value in args)]
        lines = []
        module = None
        sums, joined = segment.products, set(segment.products.values())
        for part in segment.parts:
            if part in joined:
                continue
            if part.op.module != module:
                module = part.op.module
                lines.append(f"# {module or self._made.plan.graph.name}")
            lines.append(self._statement(part, sums.get(part)))
        lines.append(f"return {tuple_of(value.name for value in results)}")
        return function(wrapped(f"def {segment.name}(", names, "):"), freed(lines))

    def _statement(self, part: Part, product: Part | None = None) -> str:
        """What a part computes; with the product to which it adds a bias, if they are one call."""
        outs = ", ".join(self._values.of_part(part, i).name for i in range(len(part.outputs)))
        if product is None:
            return f"{outs} = {self._call_text(part)}"
        bias = self._expression(part, 1)
        return f"{outs} = {self._call_text(product).removesuffix(')')}, bias={bias})"

    def _call_text(self, part: Part) -> str:
        operands = [self._expression(part, position) for position in range(len(part.inputs))]
        return part.call(operands, seed=f"rng + {part.op.index}")

    def _expression(self, part: Part, position: int) -> str:
        """What an operand of a part is made of, as an expression."""
        return combined(part.inputs[position].box, self._values.source(part, position))
