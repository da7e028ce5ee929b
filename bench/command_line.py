"""Command lines of benchmarks."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def parser_for(name: str, description: str | None, epilog: str = "") -> ArgumentParser:
    """A parser whose help keeps the line breaks; ``name`` is the benchmark's module."""
    return ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
    )
