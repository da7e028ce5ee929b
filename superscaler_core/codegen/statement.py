"""Statement: a line of a generated function, with the variables that it assigns and reads.

No code parses generated text: the writer of a statement records its variables.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Expression:
    """A Python expression.

    Attributes:
        text: its text.
        reads: the variables in it.
    """

    text: str
    reads: tuple[str, ...] = ()

    def __str__(self) -> str:
        return self.text

    @classmethod
    def of(cls, name: str) -> Expression:
        """A variable."""
        return cls(name, (name,))


NONE = Expression("None")


def tuple_expression(items: Iterable[Expression]) -> Expression:
    """A tuple of expressions."""
    given = list(items)
    text = "(" + ", ".join(item.text for item in given) + ("," if len(given) == 1 else "") + ")"
    return Expression(text, reads_of(given))


def reads_of(items: Iterable[Expression]) -> tuple[str, ...]:
    """The variables in expressions, in order."""
    return tuple(name for item in items for name in item.reads)


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement, or a comment.

    Attributes:
        text: its text, including continuation lines.
        makes: the variables that it assigns.
        reads: the variables that it reads.
        is_last: whether nothing follows that needs a variable: a return, or a comment at the end.
    """

    text: str
    makes: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    is_last: bool = False

    @classmethod
    def call(cls, text: str, *operands: Expression) -> Statement:
        """A call that assigns nothing."""
        return cls(text, reads=reads_of(operands))

    @classmethod
    def assign(cls, name: str, value: Expression, comment: str = "") -> Statement:
        """An assignment of a value to a variable."""
        return cls(f"{name} = {value}{comment}", (name,), value.reads)


def freed(statements: Sequence[Statement]) -> list[str]:
    r"""The lines of a function, with variables deleted after their last use.

    Python keeps local variables until a function returns, and with them tensors that are no longer
    needed. Arguments and returned values are not deleted, because the caller holds them.

    >>> x, y = map(Expression.of, "xy")
    >>> print("\n".join(freed([
    ...     Statement.assign("y", Expression("x + 1", ("x",))),
    ...     Statement.assign("z", Expression("y * 2", ("y",))),
    ...     Statement.assign("w", Expression("z - 1", ("z",))),
    ...     Statement("return w", reads=("w",), is_last=True),
    ... ])))
    y = x + 1
    z = y * 2
    del y
    w = z - 1
    return w
    """
    last_use: dict[str, int] = {}
    made: set[str] = set()
    end = 0
    for number, statement in enumerate(statements):
        if not statement.is_last:
            end = number
        made.update(statement.makes)
        last_use.update(dict.fromkeys((*statement.makes, *statement.reads), number))
    # After the last statement the function returns, which releases the remaining variables.
    dead: dict[int, list[str]] = {}
    for name, number in last_use.items():
        if name in made and number < end:
            dead.setdefault(number, []).append(name)
    found: list[str] = []
    for number, statement in enumerate(statements):
        found.append(statement.text)
        if number in dead:
            found.append(f"del {', '.join(dead[number])}")
    return found
