"""Text: helpers that format Python source."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from textwrap import fill

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
    """A call or signature, broken into lines if it is too long; ``indent`` is around it."""
    line = f"{head}{', '.join(items)}{tail}"
    if len(indent + line) <= WIDTH or not items:
        return line
    inner = 2 * INDENT
    body = fill(
        ", ".join(items) + ",",
        WIDTH,
        initial_indent=inner,
        subsequent_indent=inner,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return f"{head}\n{body}\n{indent}{tail.lstrip(',')}"


def function(head: str, lines: Sequence[str]) -> str:
    """A function with this first line and these body lines."""
    return "\n".join([head, *(INDENT + line for line in lines or ["pass"])])
