"""Searches: what commands over many cells have in common; options, rows that are kept, a result."""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.cells.processes import NUM_PROCESSES
from bench.cells.store import (
    Compute,
    DirtyError,
    Job,
    Row,
    Version,
    commits_text,
    rows_of,
)
from bench.environment import environment

Draw = Callable[[Path], None]
"""Writes the picture of a result."""


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str], *, out: str, budget_secs: float = 0.0
) -> argparse.Namespace:
    """The options of a command over many cells, and the line that it was called by.

    Args:
        parser: with the options that no other command has.
        words: of the command line.
        out: the usual result file.
        budget_secs: that a search usually has; 0 where all of them end by themselves.
    """
    add = parser.add_argument
    add("--out", type=Path, default=Path(out), help="the result file (default: %(default)s)")
    add(
        "--processes", type=int, default=max(1, (os.cpu_count() or 1) // NUM_PROCESSES),
        help=f"searches at a time, each of {NUM_PROCESSES} processes (default: %(default)s)",
    )  # fmt: skip
    if budget_secs:
        add(
            "--budget", type=float, default=budget_secs, metavar="SECS",
            help="of every search (default: %(default)s)",
        )  # fmt: skip
    add("--kept", action="store_true", help="compute nothing: show what is kept")
    add("--dirty", action="store_true", help="of code that is not committed; writes no result file")
    parser.set_defaults(command=f"{parser.prog} {shlex.join(words)}".strip())
    return parser.parse_args(words)


def run(args: argparse.Namespace, jobs: Sequence[Job], compute: Compute) -> list[dict[str, Any]]:
    """The rows of some jobs; what is missing is computed.

    Args:
        args: as parsed.
        jobs: the most important first.
        compute: what a job does.

    Raises:
        SystemExit: the code is not committed, or was changed during the run.
    """
    try:
        version = Version.now(compute.__module__, may_be_dirty=args.dirty or args.kept)
        return list(rows_of(jobs, compute, version, 0 if args.kept else args.processes))
    except DirtyError as error:
        raise SystemExit(f"bench: {error}") from None
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was")
        args.kept = True
        return list(rows_of(jobs, compute, version, 0))


def save(
    args: argparse.Namespace,
    figures: Mapping[str, Any],
    rows: Sequence[Row],
    draw: Draw | None = None,
) -> int:
    """Write the result file and its picture, unless the run was of no commit or has not ended.

    Args:
        args: as parsed.
        figures: the result, without where and when it was made.
        rows: all that it is made of.
        draw: the picture, if it has one.

    Returns:
        0, for the shell.
    """
    print(f"{len(rows)} rows of {commits_text(rows)}")
    if args.dirty or args.kept:
        print("no result file is written")
        return 0
    path: Path = args.out
    path.parent.mkdir(parents=True, exist_ok=True)
    result = {**environment(args.command), **figures, "commits": commits_text(rows)}
    path.write_text(json.dumps(result, indent=1) + "\n")
    print(path)
    if draw is not None:
        draw(path.with_suffix(".png"))
    return 0


def by_cell(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    """The rows of every cell, few GPUs first."""
    ordered = sorted(rows, key=lambda row: (row["gpus"], row["cell"]))
    return {name: list(mine) for name, mine in groupby(ordered, key=lambda row: row["cell"])}


def over(rows: Sequence[Row], ours: str) -> dict[str, dict[str, float]]:
    """By cell and other planner: how many times as long its step takes as ours, where both fit."""
    return {
        cell: {row["planner"]: row["secs"] / secs for row in mine if row["planner"] != ours}
        for cell, mine in by_cell([row for row in rows if "secs" in row]).items()
        for secs in [row["secs"] for row in mine if row["planner"] == ours]
    }
