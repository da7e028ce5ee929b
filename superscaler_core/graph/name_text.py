"""Name text: names of models and ops in the text of a plan, where separators have spaces.

A name in which a reader would find a separator or the end of a line is written in escapes.
"""

from __future__ import annotations

import re

_LINE = re.compile(r"^$|^\s|\s$|\\|[^\S ]")
"""What a reader of lines strips, escapes, or takes for the end of a line."""

_SEPARATOR = re.compile(r", |: |; | -> | at | (\w+\[\d+:\d+\]|copy:\d+|whole)$")
"""What a reader of a line takes for the end of a name, or for a part of an op."""

_EMPTY = r"\N{}"


def name_text(name: str) -> str:
    r"""A name as it stands in a text.

    Law (tests/superscaler_core/graph/test_name_text.py): ``name_of(name_text(name)) == name``, and
    no separator is in the text.

    >>> print(name_text("head one"), name_text("a, b"))
    head one a,\x20b
    """
    return _escaped(name) if _LINE.search(name) or _SEPARATOR.search(name) else name


def line_text(text: str) -> str:
    """A text that ends with its line."""
    return _escaped(text) if _LINE.search(text) else text


def name_of(text: str) -> str:
    """The name that a text stands for.

    Raises:
        ValueError: it has an escape that Python does not know.
    """
    if "\\" not in text:
        return text
    return "" if text == _EMPTY else text.encode("ascii").decode("unicode_escape")


def _escaped(name: str) -> str:
    return name.encode("unicode_escape").decode("ascii").replace(" ", r"\x20") or _EMPTY
