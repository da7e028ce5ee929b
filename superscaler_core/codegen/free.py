"""Free: ``del`` of what a generated function no longer needs, so that memory follows use."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

_NAME = re.compile(
    r"""
    '[^']*' | "[^"]*" | \#.*      # passed over: what texts and comments say
    | (?<![\w.]) ([^\W\d]\w*)     # no attribute
      (?!\w | =[^=])              # no keyword of a call
    """,
    re.VERBOSE,
)
_ASSIGNED = re.compile(r"([\w(), ]+?) [+]?= ")
_NO_STATEMENT = ("#", "return ")


def freed(lines: Sequence[str]) -> list[str]:
    r"""The statements of a function, with variables deleted after their last use.

    Python keeps local variables until a function returns, and with them tensors that nobody reads
    any more. Arguments belong to the caller, what is returned too. This is called for every
    function of every rank: it reads code as the writers write it, not all of Python.

    >>> print("\n".join(freed(["y = x + 1", "z = y * 2", "w = z - 1", "return w"])))
    y = x + 1
    z = y * 2
    del y
    w = z - 1
    return w

    Args:
        lines: statements, each with the lines that it goes on in, and comments.
    """
    last_use: dict[str, int] = {}
    made: set[str] = set()
    end = 0
    for number, line in enumerate(lines):
        if not line.startswith(_NO_STATEMENT):
            end = number
        if (target := _ASSIGNED.match(line)) is not None:
            made.update(_names(target[1]))
        last_use.update(dict.fromkeys(_names(line), number))
    # Behind the last statement the function returns, which lets go of all that is left.
    dead: dict[int, list[str]] = {}
    for name, number in last_use.items():
        if name in made and number < end:
            dead.setdefault(number, []).append(name)
    found: list[str] = []
    for number, line in enumerate(lines):
        found.append(line)
        if number in dead:
            found.append(f"del {', '.join(dead[number])}")
    return found


def _names(text: str) -> Iterator[str]:
    return (name for name in _NAME.findall(text) if name)
