"""Lines: what a rank does in a block, as values; ``execute`` runs them, and codegen prints them.

A line is a call of a method of ``Rank``, or a sum, with the variables that it makes. Variables are
those of one run of a block: none of them outlives it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

import rvdcomm as rv
from superscaler_core.materialize.flow import Held
from superscaler_core.materialize.transfer import Transfer
from superscaler_core.program.value import Value
from superscaler_core.schedules import ActionKind

Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Variable:
    """A value of a block, or a gradient or a sum of it.

    Attributes:
        value: the value.
        form: its name, with ``{}`` for the name of the value.
        by: for one of several gradients of the value, the segment whose backward makes it.
    """

    value: Value
    form: str = "{}"
    by: str = ""


class Fixed(Enum):
    """An expression that reads no variable."""

    MICROBATCH = "mb"
    """The number of the microbatch, or of its half, or of that of an action in a pair."""
    LOSS_GRAD = "run.loss_grad"
    NONE = "None"


@dataclass(frozen=True, slots=True)
class Function:
    """The function of a segment."""

    name: str


@dataclass(frozen=True, slots=True)
class BlockFunction:
    """The function of the microbatches that runs a block.

    Attributes:
        runs: the stage and the kind of the block's run, or those of a pair's two actions.
    """

    runs: tuple[tuple[int, ActionKind], ...]


@dataclass(frozen=True, slots=True)
class PartExpression:
    """A box of a variable, which holds the box ``within``."""

    of: Variable
    box: rv.Box
    within: rv.Box


@dataclass(frozen=True, slots=True)
class SumExpression:
    """The sum of terms of one shape."""

    terms: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class Add:
    """A sum so far, and its next term; added in place where the line makes the same sum."""

    now: Expression
    term: Expression


@dataclass(frozen=True, slots=True)
class Join:
    """The sum, in a box, of variables that each hold a box of it."""

    box: rv.Box
    pieces: tuple[tuple[Variable, rv.Box], ...]


@dataclass(frozen=True, slots=True)
class Tuple:
    """A tuple of expressions."""

    items: tuple[Expression, ...]


@dataclass(frozen=True, slots=True)
class CallExpression:
    """A call of a method of the rank, or of a block with the rank as its first argument.

    Attributes:
        of: the method's name, or the block.
        args: the arguments.
        options: the arguments with names.
    """

    of: str | BlockFunction
    args: tuple[Expression, ...] = ()
    options: tuple[tuple[str, Any], ...] = ()


Expression = (
    Variable | Fixed | Function | BlockFunction | PartExpression | Add | SumExpression | Join
    | Tuple | CallExpression | int | str | tuple[str, ...]
)  # fmt: skip
"""What a line computes; texts and lists of texts are names in the rank's tables."""


@dataclass(frozen=True, slots=True)
class Line:
    """An expression, with the variables that it makes.

    Attributes:
        value: the expression.
        makes: the variables.
        unpacks: whether the expression gives a tuple with a value for each variable.
        sub_transfers: for a move inside a stage, its transfers.
    """

    value: Expression
    makes: tuple[Variable, ...] = ()
    unpacks: bool = False
    sub_transfers: tuple[Transfer, ...] = ()

    @property
    def reads(self) -> tuple[Variable, ...]:
        """The variables that it reads, in order."""
        return variables_in(self.value)

    @property
    def is_in_place(self) -> bool:
        """Whether it adds a term to the sum that it makes."""
        return isinstance(self.value, Add) and self.makes == (self.value.now,)


def variables_in(expression: Expression) -> tuple[Variable, ...]:
    """The variables in an expression, in order."""
    match expression:
        case Variable():
            return (expression,)
        case PartExpression():
            return (expression.of,)
        case Add(now, term):
            return (*variables_in(now), *variables_in(term))
        case Join():
            return tuple(variable for variable, _ in expression.pieces)
        case SumExpression(terms=inner) | Tuple(items=inner) | CallExpression(args=inner):
            return tuple(variable for each in inner for variable in variables_in(each))
    return ()


def part(of: Variable, box: rv.Box, within: rv.Box) -> Variable | PartExpression:
    """A box of a variable; the variable itself if that is all of it."""
    return of if box == within else PartExpression(of, box, within)


def combined(box: rv.Box, sources: Sequence[Held]) -> Expression:
    """The sum, in ``box``, of values that each hold a part of it."""
    if len(sources) > 1 and not all(held.box.contains(box) for held in sources):
        return Join(box, tuple((Variable(held.value), held.box) for held in sources))
    terms = tuple(part(Variable(held.value), box, held.box) for held in sources)
    return terms[0] if len(terms) == 1 else SumExpression(terms)


def last_uses(
    lines: Iterable[tuple[Iterable[Name], Iterable[Name]]],
) -> Mapping[int, Sequence[Name]]:
    """For each place in a sequence, the names that nothing uses after it.

    Args:
        lines: the names that each line makes, and those that it reads.

    >>> last_uses([("a", ""), ("b", "a"), ("", "b")])
    {1: ['a'], 2: ['b']}
    """
    last: dict[Name, int] = {}
    made: set[Name] = set()
    for place, (makes, reads) in enumerate(lines):
        new = tuple(makes)
        made.update(new)
        last.update(dict.fromkeys((*new, *reads), place))
    found: dict[int, list[Name]] = {}
    for name, place in last.items():
        if name in made:
            found.setdefault(place, []).append(name)
    return found
