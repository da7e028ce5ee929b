"""Checks of values that a caller gives: an error names what was given, and what would be right."""

from __future__ import annotations

import numbers
from collections.abc import Iterable
from difflib import get_close_matches

from superscaler_core.errors import PlanError


def one_of(what: str, given: object, known: Iterable[str]) -> str:
    """A name that is known.

    >>> one_of("optimizer", "adam", ("sgd", "adam"))
    'adam'

    Raises:
        PlanError: it is not known; the message has the known names, and similar ones.
    """
    names = [*known]
    if isinstance(given, str) and given in names:
        return given
    near = get_close_matches(str(given), names, 3)
    hint = f" Is it {' or '.join(near)}?" if near else ""
    raise PlanError(f"there is no {what} {given!r}; there are {', '.join(names)}.{hint}")


def at_least(least: float, **given: object) -> None:
    """Refuse numbers that are too small, and what is no number; whole numbers if ``least`` is one.

    Args:
        least: the least value; an int asks for ints, a float for any number.
        given: values by the names of their arguments.

    Raises:
        PlanError: a value is none of these.
    """
    is_whole = isinstance(least, int)
    kinds = numbers.Integral if is_whole else numbers.Real
    for name, value in given.items():
        is_number = isinstance(value, kinds) and not isinstance(value, bool)
        if not is_number or not float(value) >= least:  # type: ignore[arg-type]
            kind = "a whole number" if is_whole else "a number"
            raise PlanError(f"{name}={value!r}: it is {kind} of at least {least:g}.")
