"""Text: helpers that format Python source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import rvdcomm as rv

INDENT = "    "
WIDTH = 100


def index_text(box: rv.Box, within: rv.Box) -> str:
    """The index of ``box`` in a tensor that holds ``within``; empty if it is all of it."""
    if box == within:
        return ""
    ranges = []
    for lo, hi, base, top in zip(box.lo, box.hi, within.lo, within.hi, strict=True):
        ranges.append(":" if (lo, hi) == (base, top) else f"{lo - base}:{hi - base}")
    while ranges and ranges[-1] == ":":
        ranges.pop()
    return f"[{', '.join(ranges)}]"


def tuple_of(items: Iterable[str]) -> str:
    """A tuple of expressions."""
    given = list(items)
    return "(" + ", ".join(given) + ("," if len(given) == 1 else "") + ")"


def assigned(names: Iterable[str]) -> str:
    """The left side of an assignment from a tuple; empty if the tuple is empty."""
    given = list(names)
    return f"{tuple_of(given)} = " if given else ""


def wrapped(head: str, items: Sequence[str], tail: str, indent: str = "") -> str:
    """A call or signature, broken between items if it is too long; ``indent`` is around it."""
    line = f"{head}{', '.join(items)}{tail}"
    if len(indent + line) <= WIDTH or not items:
        return line
    body = [2 * INDENT]
    for item in items:
        # No line ends inside an item, which may contain a text with spaces.
        if body[-1].strip() and len(body[-1]) + len(item) + 2 > WIDTH:
            body.append(2 * INDENT)
        body[-1] += f" {item}," if body[-1].strip() else f"{item},"
    return "\n".join([head, *body, f"{indent}{tail.lstrip(',')}"])


def function(head: str, lines: Sequence[str]) -> str:
    """A function with this first line and these body lines."""
    return "\n".join([head, *(INDENT + line for line in lines or ["pass"])])
