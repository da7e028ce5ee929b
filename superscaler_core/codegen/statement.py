"""Statement: a line of a generated function, with the variables that it assigns and reads.

No code parses generated text: the writer of a statement records its variables.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from superscaler_core.run.lines import last_uses


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


def freed(statements: Sequence[Statement]) -> list[str]:
    r"""The lines of a function, with variables deleted after their last use.

    Python keeps local variables until a function returns, and with them tensors that are no longer
    needed. Arguments and returned values are not deleted, because the caller holds them.

    >>> print("\n".join(freed([
    ...     Statement("y = x + 1", ("y",), ("x",)),
    ...     Statement("z = y * 2", ("z",), ("y",)),
    ...     Statement("w = z - 1", ("w",), ("z",)),
    ...     Statement("return w", reads=("w",), is_last=True),
    ... ])))
    y = x + 1
    z = y * 2
    del y
    w = z - 1
    return w
    """
    # After the last statement the function returns, which releases the remaining variables.
    end = max((n for n, each in enumerate(statements) if not each.is_last), default=0)
    dead = last_uses((each.makes, each.reads) for each in statements)
    found: list[str] = []
    for number, statement in enumerate(statements):
        found.append(statement.text)
        if number in dead and number < end:
            found.append(f"del {', '.join(dead[number])}")
    return found
