"""Command lines of benchmarks."""

from __future__ import annotations

from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from math import inf


def above_zero(text: str) -> float:
    """A finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < inf:
        raise ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def at_least_one(text: str) -> int:
    """An integer of 1 or more."""
    if not text.isdecimal() or not int(text):
        raise ArgumentTypeError(f"expected a whole number of 1 or more, got {text!r}")
    return int(text)


def parser_for(name: str, description: str | None, epilog: str = "") -> ArgumentParser:
    """A parser whose help keeps the line breaks; ``name`` is the benchmark's module."""
    return ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
    )
