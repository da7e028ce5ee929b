"""Execute: runs the instructions of a step program on one rank.

Every block is *bound* once: each of its lines becomes a function of the *slots* of one run, a list
with the rank, the numbers of its microbatches, constants, and variables.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial, reduce
from operator import add, iadd, itemgetter
from typing import Any

from superscaler_core import ops
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.plan import Device
from superscaler_core.program.event import Event, actions_in
from superscaler_core.program.instruction import StepInstruction
from superscaler_core.run.blocks import AROUND, block_of, event_call, lines_of, stages_of
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
    last_uses,
)
from superscaler_core.run.rank import Rank
from superscaler_core.run.tables import Tables
from superscaler_core.run.tape import SegmentFunction

Getter = Callable[[list[Any]], Any]
"""An expression, as a function of the slots."""


class Executor:
    """Runs the step program of a plan on one device.

    Args:
        made: the plan with its step program.
        device: the device.
        functions: the functions of the device's segments, by name.
        tables: the tables of the rank.

    Attributes:
        TABLES: the tables of the rank.
    """

    def __init__(
        self,
        made: Materialized,
        device: Device,
        functions: Mapping[str, SegmentFunction],
        tables: Tables,
    ) -> None:
        self._made, self._device, self._functions = made, device, functions
        self.TABLES = tables
        self._known: dict[Hashable, Callable[..., None]] = {}
        program = made.step_program
        self._calls = [
            self._bound(program.begin, AROUND),
            *map(self._event, made.events_on[device]),
            self._bound(program.end, AROUND),
        ]

    def step(self, rank: Rank) -> None:
        """Run one step."""
        rank.begin()
        for call in self._calls:
            call(rank)

    def _event(self, event: Event) -> Callable[[Rank], object]:
        """The call of an event, as a function of the rank."""
        call = event_call(self._made, event, self._device)
        microbatches = [run.microbatch for run in actions_in(event)]

        def bound(each: Any) -> Any:
            return self._block(each, microbatches) if isinstance(each, BlockFunction) else each

        method = getattr(Rank, call.of) if isinstance(call.of, str) else bound(call.of)
        args, options = [bound(arg) for arg in call.args], dict(call.options)
        return lambda rank: method(rank, *args, **options)

    def _block(self, block: BlockFunction, microbatches: Sequence[int]) -> Callable[..., None]:
        """The function of what this device does in a block for the microbatches of its actions."""
        stages = stages_of(self._made, block)
        of_runs = microbatches if len(microbatches) > 1 else [*microbatches] * len(stages)
        here = [i for i in block_of(self._made, block) if self._device in i.devices]
        mine = [i for i in here if i.is_for(of_runs[i.half or 0])]
        # A block differs among microbatches in these instructions alone.
        key = block, tuple(i for i in mine if i.microbatch is not None)
        if key not in self._known:
            self._known[key] = self._bound(mine, stages)
        return self._known[key]

    def _bound(
        self, block: Iterable[StepInstruction], stages: Sequence[int]
    ) -> Callable[..., None]:
        found = lines_of(self._made, self._device, stages, block)
        lines = [(number, line) for _, number, lines in found for line in lines]
        return _Slots(self._functions, len(stages)).bound(lines)


class _Slots:
    """Binds the lines of one block: gives constants and variables their slots.

    Args:
        functions: the functions of segments, by name.
        num_runs: the number of microbatches, or of halves, of which each has its own variables.
    """

    def __init__(self, functions: Mapping[str, SegmentFunction], num_runs: int) -> None:
        self._functions, self._num_runs = functions, num_runs
        self._first: list[Any] = [None] * (1 + num_runs)
        self._of: dict[tuple[int, Variable], int] = {}

    def bound(self, lines: Sequence[tuple[int, Line]]) -> Callable[..., None]:
        """The lines, each with the number of its run, as a function of a rank and microbatches."""
        uses = [
            ([self._slot(n, v) for v in line.makes], [self._slot(n, v) for v in line.reads])
            for n, line in lines
        ]
        gone, steps = last_uses(uses), []
        for place, ((number, line), (makes, _)) in enumerate(zip(lines, uses, strict=True)):
            value = self._getter(number, line.value, line.is_in_place)
            steps.append(_stored(value, makes, line.unpacks))
            steps += [_dropped(gone[place])] if place in gone else []
        first, num = self._first, self._num_runs

        def run(rank: Rank, mb: int = -1, *others: int) -> None:
            slots = first.copy()
            slots[0] = rank
            slots[1 : 1 + num] = (mb, *others) if others else range(mb, mb + num)
            for step in steps:
                step(slots)

        return run

    # --- expressions ----------------------------------------------------------------------------

    def _getter(self, number: int, expression: Expression, in_place: bool = False) -> Getter:
        """Computes an expression of a run."""
        match expression:
            case Fixed.LOSS_GRAD:
                return lambda slots: slots[0].loss_grad
            case PartExpression(of, box, within):
                whole, index = self._slot(number, of), box.slices_within(within)
                return lambda slots: slots[whole][index]
            case Add(now, term):
                plus: Callable[[Any, Any], Any] = iadd if in_place else add
                both = self._all(number, (now, term))
                return lambda slots: plus(*both(slots))
            case SumExpression(terms=items):
                terms = self._all(number, items)
                return lambda slots: reduce(add, terms(slots))
            case Join(box, pieces):
                text, boxes = str(box), [str(each) for _, each in pieces]
                parts = self._all(number, tuple(variable for variable, _ in pieces))
                return lambda slots: ops.join(text, [*zip(parts(slots), boxes, strict=True)])
            case Tuple(items):
                return self._all(number, items)
            case CallExpression(str(name), (str(key),), ()):
                # The most frequent argument of segments: a weight. No tuple is built for it.
                get: Any = getattr(Rank, name)
                return lambda slots: get(slots[0], key)
            case CallExpression(str(name), items, options):
                method: Any = getattr(Rank, name)
                named = partial(method, **dict(options)) if options else method
                return self._called(number, named, items)
        return itemgetter(self._place(number, expression))

    def _called(
        self, number: int, method: Callable[..., Any], items: Sequence[Expression]
    ) -> Getter:
        """Calls a method of the rank, which is in slot 0."""
        if items and not any(map(_is_computed, items)):
            placed = itemgetter(0, *(self._place(number, item) for item in items))
            return lambda slots: method(*placed(slots))
        getters: list[Getter] = [itemgetter(0), *(self._getter(number, item) for item in items)]
        return lambda slots: method(*[getter(slots) for getter in getters])

    def _all(self, number: int, items: Sequence[Expression]) -> Getter:
        """Computes the tuple of some expressions."""
        if len(items) > 1 and not any(map(_is_computed, items)):
            return itemgetter(*(self._place(number, item) for item in items))
        getters = [self._getter(number, item) for item in items]
        return lambda slots: tuple([getter(slots) for getter in getters])

    def _place(self, number: int, expression: Expression) -> int:
        """The slot of an expression that is not computed."""
        match expression:
            case Variable():
                return self._slot(number, expression)
            case Fixed.MICROBATCH:
                return 1 + number
            case Fixed.NONE:
                return self._new(None)
            case Function(name):
                return self._new(self._functions[name])
        return self._new(expression)

    def _slot(self, number: int, variable: Variable) -> int:
        """The slot of a variable."""
        key = number, variable
        if key not in self._of:
            self._of[key] = self._new(None)
        return self._of[key]

    def _new(self, value: Any) -> int:
        """A new slot, with what it has when a run begins."""
        self._first.append(value)
        return len(self._first) - 1


def _stored(value: Getter, makes: Sequence[int], unpacks: bool) -> Getter:
    """Computes a value, and stores it or its items."""
    if not makes:
        return value
    if not unpacks:
        (made,) = makes

        def one(slots: list[Any]) -> None:
            slots[made] = value(slots)

        return one

    def each(slots: list[Any]) -> None:
        for slot, item in zip(makes, value(slots), strict=True):
            slots[slot] = item

    return each


def _dropped(gone: Sequence[int]) -> Getter:
    """Drops what nothing reads again."""

    def drop(slots: list[Any]) -> None:
        for slot in gone:
            slots[slot] = None

    return drop


_COMPUTED = PartExpression | Add | SumExpression | Join | Tuple | CallExpression


def _is_computed(expression: Expression) -> bool:
    """Whether no slot has the value of an expression."""
    return expression is Fixed.LOSS_GRAD or isinstance(expression, _COMPUTED)
