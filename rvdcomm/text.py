"""Text: numbers that are read from texts, and texts that errors quote; both bounded in length.

Layouts, boxes and programs come from files and command lines. The time of ``int`` is quadratic in
the number of digits, and an error must not repeat a file of megabytes.
"""

from __future__ import annotations

import reprlib

from rvdcomm.errors import LayoutError

MAX_INTEGER = 2**63 - 1
"""Sizes, bounds and ranks are 64-bit numbers in numpy and in the native core."""

MAX_DIGITS = 19
"""Digits of the largest number."""

MAX_QUOTED = 1000
"""Most characters of a value in an error."""

_short = reprlib.Repr()
_short.maxstring, _short.maxtuple, _short.maxlist, _short.maxlong = 160, 24, 24, 40
_short.maxlevel = 2


def integer(text: str) -> int:
    """The number that a text of digits means: no sign, no spaces, no other alphabet.

    >>> integer("4096")
    4096

    Raises:
        LayoutError: it has another form, or is above ``MAX_INTEGER``.
    """
    is_short = len(text) <= MAX_DIGITS and text.isdigit() and text.isascii()
    if not is_short or (number := int(text)) > MAX_INTEGER:
        raise LayoutError(
            f"invalid literal {quoted(text)}: expected a number from 0 to {MAX_INTEGER}"
        )
    return number


def quoted(value: object) -> str:
    """``repr`` for an error: long texts and many numbers are shortened in their middle or end.

    >>> quoted(range(3)), quoted(tuple(range(1000)))[-8:]
    ('range(0, 3)', '23, ...)')
    """
    text = _short.repr(value)
    return text if len(text) <= MAX_QUOTED else f"{text[:MAX_QUOTED]}..."
