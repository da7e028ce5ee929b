"""``python -m bench.search``: compare our planner with all others, on models of their papers."""

from __future__ import annotations

import argparse
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean

from bench.cells import dots
from bench.cells.cell import Cell
from bench.cells.searches import by_cell, equally_priced, over, parse, run, save
from bench.cells.store import Job, Row
from bench.command_line import parser_for
from bench.search.catalogue import cells, compute
from rvdcomm.units import secs_text
from superscaler_core.planners import PLANNERS

DESCRIPTION = """\
Search for a plan of every model by every planner, by shipped plans with the options that a person
would try, and by the systems of the studies, tuned over their own options. All of them have the
same cost model and memory, and are offered overlap. For each cell the ratio is the step of the best
other planner over that of auto: at least 1 if auto is never slower. Everything is simulated;
nothing was run on a GPU.

Models are captured before the searches: first auto and the tuned systems on all cells, then the
other planners cell by cell. What was computed is kept under bench/results/scratch, so a run that is
stopped goes on where it was.
"""

EPILOG = """\
examples:
  python -m bench.search --quick                     # 4 and 8 GPUs
  python -m bench.search --cells gpt3-4,moe-2.4b     # cells whose names begin so
  python -m bench.search --budget 15                 # seconds of a search, in place of 60
  python -m bench.search --evaluations 48 --planners auto       # equal on every machine
  python -m bench.search --kept                      # the table of what was computed so far
  python -m bench.search --others bench/results/search.json     # auto, and what the file lacks
"""


DAY_SECS = 86400.0
"""The time limit of a search whose budget is in evaluations."""


# --- jobs ---------------------------------------------------------------------------------------


def wanted_of(chosen: Sequence[Cell], planners: Sequence[str] = ()) -> Iterator[tuple[Cell, str]]:
    """Pairs of cell and planner to compute, those for the most important ratios first."""
    first = [(cell, name) for cell in chosen for name in (*cell.first, *cell.systems)]
    rest = [(cell, name) for cell in chosen for name in PLANNERS]
    for cell, name in dict.fromkeys((cell.name, name) for cell, name in (*first, *rest)):
        if not planners or name in planners:
            yield cells()[cell], name


# --- ratios -------------------------------------------------------------------------------------


def best_of(rows: Sequence[Row], names: Collection[str] = ()) -> Row | None:
    """The row of the fastest planner other than ``auto``; None if these found no plan.

    Args:
        rows: the rows of one cell.
        names: names of the planners to consider; all if empty.
    """
    others = [row for row in rows if "secs" in row and row["planner"] != "auto"]
    found = [row for row in others if not names or row["planner"] in names]
    return min(found, key=lambda row: float(row["secs"]), default=None)


def ours_of(rows: Sequence[Row]) -> Row | None:
    """The row of ``auto``; None if it found no plan."""
    return next((row for row in rows if "secs" in row and row["planner"] == "auto"), None)


def ratio(rows: Sequence[Row], names: Collection[str] = ()) -> float | None:
    """The step time of the best other planner over that of ``auto``; None if one has no plan.

    Args:
        rows: the rows of one cell.
        names: names of the other planners to consider; all if empty.
    """
    ours, other = ours_of(rows), best_of(rows, names)
    return float(other["secs"]) / float(ours["secs"]) if ours and other else None


def ceiling(rows: Sequence[Row], names: Collection[str] = ()) -> float | None:
    """The ratio that a plan would reach with the computation of the best other, without waiting."""
    other = best_of(rows, names)
    return 1 / float(other["shares"]["compute"]) if other else None


def table(rows: Sequence[Row], tuned: Mapping[str, Sequence[str]]) -> str:
    """A line per cell, and the means.

    Args:
        rows: the rows of all cells.
        tuned: names of the tuned systems of every cell.
    """
    head = (
        f"{'cell':<30} {'auto':>8} {'took':>5} {'full':>4} {'others':>8} {'ratio':>6} {'tuned':>6}"
    )
    lines = [f"{head} {'ceiling':>7}"]
    figures: list[tuple[float | None, ...]] = []
    for name, mine in by_cell(rows).items():
        ours, best = ours_of(mine), best_of(mine)
        numbers = ratio(mine), ratio(mine, tuned[name]), ceiling(mine, tuned[name])
        figures.append(numbers)
        texts = ["-" if number is None else f"{number:.3f}" for number in numbers]
        lines.append(
            f"{name:<30} {secs_text(ours['secs']) if ours else '-':>8} "
            f"{ours['search_secs'] if ours else 0:4.0f}s {ours.get('full', '') if ours else '':>4} "
            f"{secs_text(best['secs']) if best else '-':>8} {texts[0]:>6} {texts[1]:>6} "
            f"{texts[2]:>7} {best['planner'] if best else ''}"
        )
    ratios, over_tuned, ceilings = (
        [each[place] for each in figures if each[place] is not None] for place in range(3)
    )
    if ratios:
        lines.append(f"least ratio {min(ratios):.3f}, cells below 1: {sum(r < 1 for r in ratios)}")
    if over_tuned:
        lines.append(f"mean over the best tuned system {fmean(over_tuned):.3f}")
        lines.append(f"mean of 1 / the share of computing in its step {fmean(ceilings):.3f}")
    return "\n".join(lines)


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a dot for every cell and planner: its step time over that of ``auto``."""
    title, across = "All planners, simulated", "step over that of auto"
    dots.draw(over(rows, "auto"), path, across=across, title=title, is_log=True)


def main(words: list[str]) -> int:
    """Run the command."""
    args = _parse(words)
    beginnings = tuple(args.cells.split(",")) if args.cells else ("",)
    chosen = [
        cell
        for cell in cells().values()
        if "auto" in cell.first
        and cell.name.startswith(beginnings)
        and (not args.quick or cell.num_gpus <= 8)
    ]
    planners = args.planners.split(",") if args.planners else ()
    budget_secs = DAY_SECS if args.evaluations else args.budget
    jobs = [
        Job(cell.name, name, budget_secs, cell.workload, args.evaluations, cell.num_gpus)
        for cell, name in wanted_of(chosen, planners)
    ]
    searched, older = rows_of_jobs(args, jobs)
    rows = [*searched, *older]
    tuned = {cell.name: (*cell.systems,) for cell in chosen}
    print(table(rows, tuned))
    figures = {"tuned": tuned, "rows": rows}
    return save(args, figures, searched, partial(draw, rows), older)


def rows_of_jobs(args: argparse.Namespace, jobs: Sequence[Job]) -> tuple[list[Row], list[Row]]:
    """The rows of jobs: those of the code of today, and those that ``--others`` gives."""
    if not args.others:
        return [*run(args, jobs, compute)], []
    given = json.loads(args.others.read_text())["rows"]
    found: list[Row] = []
    taken: list[Row] = []
    # One planner after another: its plans show of which cells the other planners' rows are taken.
    for planner in dict.fromkeys(job.planner for job in jobs):
        older = {(row["cell"], row["planner"]): row for row in equally_priced(found, given)}
        mine = {(job.cell, planner): job for job in jobs if job.planner == planner}
        taken += [older[key] for key in mine if key in older]
        found += run(args, [job for key, job in mine.items() if key not in older], compute)
    return found, taken


def _parse(words: list[str]) -> argparse.Namespace:
    parser = parser_for("search", DESCRIPTION, EPILOG)
    parser.add_argument("--cells", metavar="NAME,...", help="beginnings of cells' names")
    parser.add_argument("--planners", metavar="NAME,...", help="only these (default: all)")
    parser.add_argument(
        "--others",
        type=Path,
        metavar="FILE",
        help="take rows of all planners but auto from this result, for cells where plans that are "
        "found again take the same time as then",
    )
    parser.add_argument("--quick", action="store_true", help="only 4 and 8 GPUs")
    parser.add_argument(
        "--evaluations",
        type=int,
        default=0,
        metavar="NUM",
        help="budget of a search in evaluations, quick and full ones, in place of seconds",
    )
    return parse(parser, words, out="bench/results/search.json", budget_secs=60.0)
