"""Command lines of benchmarks."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter


def parser_for(name: str, description: str, epilog: str) -> ArgumentParser:
    """A command line whose help keeps its lines; ``name`` is the benchmark's module."""
    return ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        epilog=epilog,
        formatter_class=RawDescriptionHelpFormatter,
    )
