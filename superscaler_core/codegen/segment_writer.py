"""SegmentWriter: segments as Python functions of tensors."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.codegen.free import freed
from superscaler_core.codegen.segments import Segment
from superscaler_core.codegen.text import function, tuple_of, wrapped
from superscaler_core.codegen.values import Value, Values, combined
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.part import Part

_TAKE_BIAS = ("F.linear(", "F.conv1d(", "F.conv2d(", "F.conv3d(", "ops.conv(")
"""Code of products that take a bias as the keyword of that name."""


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
        merged = self._merged(segment, {value.name for value in results})
        for part in segment.parts:
            if part in merged.values():
                continue
            if part.op.module != module:
                module = part.op.module
                lines.append(f"# {module or self._made.plan.graph.name}")
            lines.append(self._statement(part, merged.get(part)))
        lines.append(f"return {tuple_of(value.name for value in results)}")
        return function(wrapped(f"def {segment.name}(", names, "):"), freed(lines))

    def _merged(self, segment: Segment, exported: set[str]) -> dict[Part, Part]:
        """Parts that add a bias, with the product that each adds it to, which is made in one call.

        They are two ops so that a sum may be cut; where it is not, torch does both at once.
        """
        makers = {self._values.of_part(part, 0).name: part for part in segment.parts}
        found = {}
        for part in segment.parts:
            if part.op.kind != "add_bias":
                continue
            sources = self._values.source(part, 0)
            product = makers.get(sources[0].name) if len(sources) == 1 else None
            if product is None or sources[0].name in exported:
                continue
            has_one_reader = len(self._made.plan.graph.readers[product.op.outputs[0]]) == 1
            takes_bias = product.op.code.startswith(_TAKE_BIAS) and len(product.inputs) == 2
            is_whole = product.outputs[0].box == part.inputs[0].box
            if has_one_reader and takes_bias and is_whole and not product.outputs[0].summand:
                found[part] = product
        return found

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
