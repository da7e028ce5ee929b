r"""Quoted: names and texts of a model as Python source; the only place where they become source.

Names are data: a module may be called anything, and so may its parameters, inputs and arguments.
"""

from __future__ import annotations

from typing import Any


def quoted(text: str) -> str:
    r"""A text as a Python literal on one line, of ASCII characters and without braces.

    Laws (tests/superscaler_core/test_quoted.py): Python reads the literal as the text, also inside
    a template that is filled by ``str.format``; the literal without its quotes can stand in a
    comment or in a docstring.

    >>> print(quoted('a "b"\n{c}'))
    "a \"b\"\n\x7bc\x7d"
    """
    # A text with a double quote is delimited by single quotes, and its double quotes stay.
    inner = ascii('"' + text)[2:-1]
    for character, escaped in (('"', '\\"'), ("{", "\\x7b"), ("}", "\\x7d")):
        inner = inner.replace(character, escaped)
    return f'"{inner}"'


def commented(text: str) -> str:
    """A text inside a comment or a docstring."""
    return quoted(text)[1:-1]


def literal(value: Any) -> str:
    """A number, a text, None, a dtype, or a list, tuple or dict of these, as Python source.

    >>> literal([1, float("-inf"), "none", None])
    '[1, float("-inf"), "none", None]'
    """
    if isinstance(value, str):
        return quoted(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{literal(k)}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, float) and value - value != 0:
        return f'float("{value}")'
    return repr(value)
