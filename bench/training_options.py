"""Training options: what every benchmark that trains a GPT is asked on its command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def parser_for(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """A command line whose help keeps its lines; ``name`` is the benchmark's module."""
    return argparse.ArgumentParser(
        prog=f"python -m bench.{name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def parse_training(
    parser: argparse.ArgumentParser,
    words: Sequence[str],
    *,
    methods: Sequence[str],
    steps: int,
    layers: int,
) -> argparse.Namespace:
    """Read a command line that has the options of all training too.

    Args:
        parser: with the benchmark's own options.
        words: of the command line.
        methods: that there are.
        steps, layers: the defaults.

    Returns:
        All options; ``methods`` is a list, and ``model`` has the sizes of the GPT by name.
    """
    name = parser.prog.rpartition(".")[2]
    parser.add_argument("--methods", default=",".join(methods), help="default: %(default)s")
    parser.add_argument(
        "--steps", type=int, default=steps, help="timed steps (default %(default)s)"
    )
    sizes = {"layers": layers, "width": 256, "heads": 8, "sequence": 128, "vocabulary": 1000}
    for size, value in sizes.items():
        parser.add_argument(f"--{size}", type=int, default=value, help=f"default {value}")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(f"bench/results/scratch/{name}.json"),
        help="result file (default: %(default)s)",
    )
    args = parser.parse_args(words)
    args.model = {size: getattr(args, size) for size in sizes}
    args.methods = args.methods.split(",")
    if not set(args.methods) <= set(methods):
        parser.error(f"the methods are {', '.join(methods)}")
    return args
