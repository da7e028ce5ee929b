"""``rvdcomm bench``: the benchmark of the source tree that this package lies in."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path as FilePath

from rvdcomm.cli.command import Command, UsageError


def _bench(args: argparse.Namespace) -> int:
    """Run the benchmark of the source tree that this package lies in."""
    root = FilePath(__file__).resolve().parents[2]
    if not (root / "bench" / "run.py").exists():
        raise UsageError(
            "the benchmark is part of the repository and not of the installed package; "
            "run 'make bench' in a clone of the repository."
        )
    paths = [str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    passed_on = args.passed_on[1:] if args.passed_on[:1] == ["--"] else args.passed_on
    command = [sys.executable, "-m", "bench.run", *passed_on]
    return subprocess.run(command, env=environment, check=False).returncode


def _add_bench(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("arguments", metavar="ARGS", nargs="*", help="passed on to 'bench.run'")


COMMAND = Command(
    "run the benchmark of the repository ('python -m bench.run ARGS')",
    """examples:
  The benchmark's own options:
    rvdcomm bench -- --help
""",
    _add_bench,
    _bench,
)
