"""SegmentWriter: segments as Python functions of tensors; functions that do the same are one.

A block that a segment repeats is a function of its own, called with the weights of each block.
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from superscaler_core.codegen.line_writer import LineWriter
from superscaler_core.codegen.loops import repeats_of
from superscaler_core.codegen.statement import Statement, freed
from superscaler_core.codegen.text import function, tuple_of, wrapped
from superscaler_core.graph.part import Part
from superscaler_core.materialize.flow import DeviceFlow, Held
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Segment
from superscaler_core.program.value import Value
from superscaler_core.quoted import commented, quoted
from superscaler_core.run.lines import Expression, Variable, combined, variables_in

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
    """Writes segments, with one statement per part; ``flow`` has the values of their stage."""

    def __init__(self, made: Materialized, flow: DeviceFlow, writer: LineWriter) -> None:
        self._made, self._flow, self._writer = made, flow, writer

    def body(self, segment: Segment) -> Body:
        """The parts of a segment, with its arguments and results."""
        mine = self._flow.of[segment.name]
        ends = _variables(mine.args), _variables(mine.results)
        return Body(segment.name, segment.parts, *ends, segment.products)

    def function(self, segment: Segment) -> str:
        """The function of a segment, with a statement for each of its parts."""
        return self.text(self.body(segment))

    def text(self, body: Body, calls: Mapping[Part, Statement | None] | None = None) -> str:
        """The function of some parts.

        ``calls`` has the parts that functions of their own compute, the first with the call.
        """
        names = [SEED, *self._writer.names(body.args)]
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
        results = self._writer.names(body.results)
        lines.append(Statement(f"return {tuple_of(results)}", reads=results, is_last=True))
        return function(wrapped(f"def {body.name}(", names, "):"), freed(lines))

    def form_of(self, body: Body) -> Hashable:
        """A key that is equal for bodies whose functions do the same, whatever the names."""
        numbers: dict[Value, int] = {}

        def number(each: Variable | Held) -> int:
            return numbers.setdefault(each.value, len(numbers))

        given = tuple(map(number, body.args))
        parts = []
        for part in body.parts:
            sources = (self._flow.read(part, i) for i in range(len(part.op.inputs)))
            read = tuple(tuple((number(held), held.box) for held in each) for each in sources)
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
            held.value: place
            for place, part in enumerate(body.parts)
            for position in range(len(part.op.inputs))
            for held in self._flow.read(part, position)
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
                read = _variables(self._flow.read(part, position))
                args |= {each.value: each for each in read if each.value not in made}
        products = {a: b for a, b in body.products.items() if a in mine and b in mine}
        results = [each for value, each in made.items() if value in wanted]
        return Body(name, parts, [*args.values()], results, products)

    # --- statements -----------------------------------------------------------------------------

    def _statement(self, part: Part, product: Part | None = None) -> Statement:
        """The statement of a part, or of a bias addition with its product in one call."""
        outs, called = self._writer.names(self._made_by(part)), product or part
        operands = [self._operand(called, position) for position in range(len(called.inputs))]
        texts, seed = [*map(self._writer.text, operands)], f"{SEED} + {called.op.seed}"
        call = called.call(texts, seed, None if product is None else self._bias(part))
        given = operands if product is None else [*operands, self._operand(part, 1)]
        reads = self._writer.names(v for each in given for v in variables_in(each))
        return Statement(f"{', '.join(outs)} = {call}", outs, reads)

    def _bias(self, part: Part) -> str:
        """The bias that a part adds, in the dtype of the sum."""
        bias, dtype = self._writer.text(self._operand(part, 1)), part.op.outputs[0].dtype
        return bias if part.op.inputs[1].dtype == dtype else f"({bias}).to(torch.{dtype})"

    def _operand(self, part: Part, position: int) -> Expression:
        """The expression of an operand of a part."""
        return combined(part.inputs[position].box, self._flow.read(part, position))

    def _made_by(self, part: Part) -> tuple[Variable, ...]:
        """The variables of a part's results."""
        return _variables(self._flow.result(part, i) for i in range(len(part.op.outputs)))

    def call_of(self, known: Body, block: Body) -> Statement:
        """The call of a function that does what a block does."""
        shift = block.seeds[0] - known.seeds[0] if block.seeds else 0
        reads, outs = self._writer.names(block.args), self._writer.names(block.results)
        args = [f"{SEED} + {shift}" if shift else SEED, *reads]
        head = f"{', '.join(outs)}{',' if len(outs) == 1 else ''} = {known.name}("
        return Statement(wrapped(head, args, ")", "    "), outs, reads)


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
            calls[block.parts[0]] = writer.call_of(first, block)
        yield writer.text(body, calls)


def _variables(values: Iterable[Held]) -> tuple[Variable, ...]:
    return tuple(Variable(held.value) for held in values)
