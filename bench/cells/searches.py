"""Searches: the common parts of commands over many cells: options, stored rows, and the result."""

from __future__ import annotations

import argparse
import os
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.cells.store import (
    Compute,
    DirtyError,
    Job,
    Row,
    Version,
    commits_text,
    restore,
    rows_of,
)
from bench.command_line import above_zero
from bench.result import environment, write

PRICE = ("secs", "peak_bytes")
"""The figures of a row that are the price of its plan."""

Draw = Callable[[Path], None]
"""Writes the picture of a result."""


def parse(
    parser: argparse.ArgumentParser, words: Sequence[str], *, out: str, budget_secs: float = 0.0
) -> argparse.Namespace:
    """Parse the options of a command over many cells.

    The result has the call as ``name`` and ``words``, and ``start``, the time on the monotonic
    clock.

    Args:
        parser: a parser that has the options of this command only.
        words: words of the command line.
        out: default path of the result file.
        budget_secs: default time budget of a search; 0 if the command needs no budget.
    """
    add = parser.add_argument
    add("--out", type=Path, default=Path(out), help="the result file (default: %(default)s)")
    add(
        "--processes", type=int, default=os.cpu_count() or 1,
        help="searches at a time, each of one process (default: %(default)s)",
    )  # fmt: skip
    if budget_secs:
        add(
            "--budget", type=above_zero, default=budget_secs, metavar="SECS",
            help="of a search, in seconds of processor time (default: %(default)s)",
        )  # fmt: skip
    add(
        "--rows", type=Path, nargs="*", default=(), metavar="FILE",
        help="results whose rows are taken where the code is the same: go on on another machine",
    )  # fmt: skip
    add("--kept", action="store_true", help="compute nothing: show what is kept")
    add("--dirty", action="store_true", help="of code that is not committed; writes no result file")
    name = parser.prog.removeprefix("python -m bench.")
    parser.set_defaults(name=name, words=words, start=time.monotonic())
    return parser.parse_args(words)


def run(args: argparse.Namespace, jobs: Sequence[Job], compute: Compute) -> list[dict[str, Any]]:
    """The rows of ``jobs``; rows that are not in the store are computed.

    Args:
        args: result of ``parse``.
        jobs: the jobs, the most important first.
        compute: computes the row of a job.

    Raises:
        SystemExit: the code is not committed, or was changed during the run.
    """
    version = _version(args, compute)
    try:
        for path in args.rows:
            restore(path, version)
        return list(rows_of(jobs, compute, version, 0 if args.kept else args.processes))
    except DirtyError as error:
        raise SystemExit(f"bench: {error}") from None
    except KeyboardInterrupt:
        print("stopped; the same command goes on where it was")
        args.kept = True
        return list(rows_of(jobs, compute, version, 0))


def _version(args: argparse.Namespace, compute: Compute) -> Version:
    """The current version of the code; exits if code is not committed that has to be."""
    try:
        return Version.now(compute.__module__, may_be_dirty=args.dirty or args.kept)
    except DirtyError as error:
        raise SystemExit(f"bench: {error}") from None


def equally_priced(rows: Sequence[Row], older: Sequence[Row]) -> list[Row]:
    """The rows of an older result that are of cells whose plans still take the same time.

    A cell is such if a planner chose the same plan then and now, and if each planner that did found
    the same time and memory. An older search may have missed a plan that is found now.

    Args:
        rows: rows of the code of today.
        older: rows of the older result, of which some have the same cells and planners.
    """
    plan, figures = itemgetter("cell", "planner", "plan", "samples"), itemgetter(*PRICE)
    found = {plan(row): figures(row) for row in rows if "secs" in row}
    agree = defaultdict[str, set[bool]](set)
    for row in older:
        if "secs" in row and plan(row) in found:
            agree[row["cell"]].add(found[plan(row)] == figures(row))
    return [row for row in older if agree[row["cell"]] == {True}]


def origin_text(rows: Sequence[Row], older: Sequence[Row] = ()) -> str:
    """The commits of the rows of a result, and what is equal at them.

    Args:
        rows: rows of the code of today.
        older: rows of which only the prices are those of the code of today (``equally_priced``).
    """
    parts = []
    if rows:
        is_one = len({row["commit"] for row in rows}) == 1
        parts.append(commits_text(rows) + ("" if is_one else ", equal in all that rows depend on"))
    if older:
        parts.append(
            f"rows of older planners, whose plans have the same prices today: {commits_text(older)}"
        )
    return "; ".join(parts)


def save(
    args: argparse.Namespace,
    figures: Mapping[str, Any],
    rows: Sequence[Row],
    draw: Draw | None = None,
    older: Sequence[Row] = (),
) -> int:
    """Write the result file and its picture, unless the code is uncommitted or the run incomplete.

    ``wall_secs`` of the file is the time of this call, without that of calls that were stopped.

    Args:
        args: result of ``parse``.
        figures: the result without its environment (machine, versions, date).
        rows: rows of the code of today from which the result was computed.
        draw: draws the picture; None for no picture.
        older: other such rows, as of ``origin_text``.

    Returns:
        0, for the shell.
    """
    origin = origin_text(rows, older)
    print(f"{len(rows) + len(older)} rows of {origin}")
    if args.dirty or args.kept:
        print("no result file is written")
        return 0
    wall_secs = {"wall_secs": round(time.monotonic() - args.start)}
    known = environment(args.name, args.words)
    write({**known, **wall_secs, **figures, "commits": origin}, args.out, draw)
    return 0


def by_cell(rows: Sequence[Row]) -> Mapping[str, list[Row]]:
    """The rows by cell, cells with few GPUs first."""
    ordered = sorted(rows, key=lambda row: (row["gpus"], row["cell"]))
    return {name: list(mine) for name, mine in groupby(ordered, key=lambda row: row["cell"])}


def over(rows: Sequence[Row], ours: str) -> dict[str, dict[str, float]]:
    """By cell and planner: step time over that of planner ``ours``, where both have a plan."""
    return {
        cell: {row["planner"]: row["secs"] / secs for row in mine if row["planner"] != ours}
        for cell, mine in by_cell([row for row in rows if "secs" in row]).items()
        for secs in [row["secs"] for row in mine if row["planner"] == ours]
    }
