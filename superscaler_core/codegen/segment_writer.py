"""SegmentWriter: segments as Python functions of tensors; functions that do the same are one.

A long segment repeats the blocks of its model. Such a block is a function of its own, which the
segment calls with the weights of each block.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from superscaler_core.codegen.repeats import repeats_of
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
from superscaler_core.program.value import Value
from superscaler_core.quoted import commented, quoted

SEED = "rng"
"""The first argument of a function: the number that seeds its random numbers."""


@dataclass(frozen=True, eq=False)
class Body:
    """Parts that run one after another.

    Attributes:
        name: name of the function.
        parts: the parts, in order.
        args, results: the variables that it takes and returns.
        products: as in ``Segment``.
    """

    name: str
    parts: Sequence[Part]
    args: Sequence[Variable]
    results: Sequence[Variable]
    products: Mapping[Part, Part]

    @property
    def seeds(self) -> tuple[int, ...]:
        """The seeds of the parts that draw random numbers."""
        return tuple(part.op.seed for part in self.parts if "seed" in part.form.call)


class SegmentWriter:
    """Writes segments, with one statement per part.

    Args:
        made: the plan.
        flow: the values of the stage on the device.
        variables: the variables of the device.
    """

    def __init__(self, made: Materialized, flow: Flow, variables: Variables) -> None:
        self._made, self._flow, self._variables = made, flow, variables

    def body(self, segment: Segment) -> Body:
        """The parts of a segment, with its arguments and results."""
        mine, all_of = self._flow.of[segment.name], self._variables.all
        ends = all_of(mine.args), all_of(mine.results)
        return Body(segment.name, segment.parts, *ends, segment.products)

    def function(self, segment: Segment) -> str:
        """The function of a segment, with a statement for each of its parts."""
        return self.text(self.body(segment))

    def text(self, body: Body, calls: Mapping[Part, Statement | None] | None = None) -> str:
        """The function of some parts.

        Args:
            body: the parts.
            calls: for parts that functions of their own compute, the call, at the first of them.
        """
        names = [SEED, *(variable.name for variable in body.args)]
        lines: list[Statement] = []
        module = None
        calls = calls or {}
        # A product and its bias are one call only where both are statements of this function.
        products = {a: b for a, b in body.products.items() if a not in calls and b not in calls}
        joined = set(products.values())
        for part in body.parts:
            if part in calls:
                call = calls[part]
                lines += [call] if call is not None else []
                continue
            if part in joined:
                continue
            if part.op.module != module:
                module = part.op.module
                title = commented(module or self._made.plan.graph.name)
                lines.append(Statement(f"# {title}", is_last=True))
            lines.append(self._statement(part, products.get(part)))
        value = tuple_expression(Expression.of(result.name) for result in body.results)
        lines.append(Statement(f"return {value}", reads=value.reads, is_last=True))
        return function(wrapped(f"def {body.name}(", names, "):"), freed(lines))

    def form_of(self, body: Body) -> Hashable:
        """A key that is equal for bodies whose functions do the same, whatever the names."""
        numbers: dict[str, int] = {}

        def number(variable: Variable) -> int:
            return numbers.setdefault(variable.name, len(numbers))

        given = tuple(map(number, body.args))
        parts = []
        for part in body.parts:
            sources = (self._read(part, i) for i in range(len(part.op.inputs)))
            read = tuple(tuple((number(v), v.box) for v in values) for values in sources)
            parts.append((part.form, read, tuple(map(number, self._made_by(part)))))
        places = {part: place for place, part in enumerate(body.parts)}
        sums = tuple((places[a], places[b]) for a, b in body.products.items() if a in places)
        first = body.seeds[:1] or (0,)
        shifts = tuple(seed - first[0] for seed in body.seeds)
        return given, tuple(parts), sums, tuple(map(number, body.results)), shifts

    # --- repeated blocks ------------------------------------------------------------------------

    def blocks(self, body: Body) -> Iterator[Body]:
        """The parts of a body that repeat, as bodies of their own."""
        found = repeats_of([id(part.form) for part in body.parts])
        last = self._last_reads(body) if found else {}
        for number, places in enumerate(found):
            wanted = {value for value, place in last.items() if place >= places.stop}
            parts = [body.parts[place] for place in places]
            yield self._block(f"{body.name}_block{number}", body, parts, wanted)

    def _last_reads(self, body: Body) -> Mapping[Value, int]:
        """For each value that a body reads or returns, the place of the last reader."""
        found = {
            variable.value: place
            for place, part in enumerate(body.parts)
            for position in range(len(part.op.inputs))
            for variable in self._read(part, position)
        }
        return found | {variable.value: len(body.parts) for variable in body.results}

    def _block(
        self, name: str, body: Body, parts: Sequence[Part], wanted: Container[Value]
    ) -> Body:
        """Some consecutive parts of a body; what is ``wanted`` after them is a result."""
        mine = set(parts)
        made = {v.value: v for part in parts for v in self._made_by(part)}
        args: dict[Value, Variable] = {}
        for part in parts:
            for position in range(len(part.op.inputs)):
                read = (v for v in self._read(part, position) if v.value not in made)
                args |= {variable.value: variable for variable in read}
        products = {a: b for a, b in body.products.items() if a in mine and b in mine}
        results = [variable for value, variable in made.items() if value in wanted]
        return Body(name, parts, [*args.values()], results, products)

    # --- statements -----------------------------------------------------------------------------

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
        texts, seed = [operand.text for operand in operands], f"{SEED} + {part.op.seed}"
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


class Functions:
    """The functions of a file: each that does the same as another one is that function again."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Body] = {}

    def of(self, writer: SegmentWriter, segment: Segment) -> Iterator[str]:
        """The texts that define the function of a segment."""
        body = writer.body(segment)
        known = self._known.setdefault(writer.form_of(body), body)
        if known is not body:
            shift = body.seeds[0] - known.seeds[0] if body.seeds else 0
            more = f", shift={shift}" if shift else ""
            yield f"{body.name} = like({known.name}, {quoted(body.name)}{more})"
            return
        calls: dict[Part, Statement | None] = {}
        for block in writer.blocks(body):
            first = self._known.setdefault(writer.form_of(block), block)
            if first is block:
                yield writer.text(block)
            calls |= dict.fromkeys(block.parts)
            calls[block.parts[0]] = _call_of(first, block)
        yield writer.text(body, calls)


def _call_of(known: Body, block: Body) -> Statement:
    """The call of a function that does what a block does."""
    shift = block.seeds[0] - known.seeds[0] if block.seeds else 0
    args = [f"{SEED} + {shift}" if shift else SEED, *(variable.name for variable in block.args)]
    outs = tuple(variable.name for variable in block.results)
    head = f"{', '.join(outs)}{',' if len(outs) == 1 else ''} = {known.name}("
    reads = tuple(variable.name for variable in block.args)
    return Statement(wrapped(head, args, ")", "    "), outs, reads)
