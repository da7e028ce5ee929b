"""Sections of pages that compare ``auto`` with all other planners and systems."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from statistics import fmean, median
from typing import Any

from bench import alpa_plans
from bench.cells.searches import by_cell
from bench.pages.text import Pictures, Result
from bench.search import command
from bench.tables import Lines, markdown
from rvdcomm.units import secs_text
from superscaler_core.planners import PLANNERS

Cells = Mapping[str, Sequence[Mapping[str, Any]]]
"""Rows by the names of cells, cells with few GPUs first."""


def reached(result: Result, pictures: Pictures) -> Iterator[str]:
    """The step time of the best other planner or system over that of ``auto``."""
    cells = by_cell(result["rows"])
    # Older results count planners that run first among the tuned systems.
    tuned = {
        cell: [name for name in names if name not in PLANNERS]
        for cell, names in result["tuned"].items()
    }
    yield markdown(summary_lines(cells, tuned))
    yield "Every cell:"
    yield markdown(cell_lines(cells))
    ours = [row for row in result["rows"] if row["planner"] == "auto" and row.get("bound_secs")]
    gaps = [row["secs"] / row["bound_secs"] for row in ours]
    if gaps:
        yield (
            f"The step of `auto` takes {median(gaps):.3f} times its bound in the median of "
            f"{len(gaps)} cells, {min(gaps):.3f} to {max(gaps):.3f}."
        )


def beside_published(result: Result, pictures: Pictures) -> Iterator[str]:
    """Alpa's published plans beside those of our version of its planner."""
    yield markdown(alpa_plans.lines(result["rows"]))


def summary_lines(cells: Cells, tuned: Mapping[str, Sequence[str]]) -> Lines:
    """A line per number of GPUs, and one for all cells.

    Args:
        cells: the rows of every cell.
        tuned: names of the tuned systems of every cell.
    """
    head = ["GPUs", "cells", "least ratio", "median", "mean", "largest", "mean ceiling"]
    lines = [[*head, "mean over tuned systems"]]
    of_gpus = [
        (str(n), [*names]) for n, names in groupby(cells, lambda cell: cells[cell][0]["gpus"])
    ]
    for gpus, names in (*of_gpus, ("all", [*cells])):
        given = {name: command.ratio(cells[name]) for name in names}
        ratios = {name: ratio for name, ratio in given.items() if ratio is not None}
        if not ratios:
            continue
        figures, most = [*ratios.values()], max(ratios, key=lambda name: ratios[name])
        ceilings = [command.ceiling(cells[name]) or 1.0 for name in ratios]
        over = [command.ratio(cells[name], tuned[name]) for name in ratios]
        over_tuned = [each for each in over if each is not None]
        lines.append([
            gpus, str(len(ratios)), *(f"{of(figures):.3f}" for of in (min, median, fmean)),
            f"{ratios[most]:.3f}, {most}", f"{fmean(ceilings):.3f}",
            f"{fmean(over_tuned):.3f}" if over_tuned else "-",
        ])  # fmt: skip
    return lines


def cell_lines(cells: Cells) -> Lines:
    """A line per cell."""
    head = ["cell", "GPUs", "auto", "search", "x bound", "best other", "its step", "search"]
    lines = [[*head, "ratio", "ceiling"]]
    for name, rows in cells.items():
        ours, best = command.ours_of(rows), command.best_of(rows)
        figures = command.ratio(rows), command.ceiling(rows)
        lines.append([
            name, str(rows[0]["gpus"]), secs_text(ours["secs"]) if ours else "none",
            secs_text(ours["search_secs"]) if ours else "-",
            f"{ours['secs'] / ours['bound_secs']:.3f}" if ours and "bound_secs" in ours else "-",
            best["planner"] if best else "none",
            *([secs_text(best["secs"]), secs_text(best["search_secs"])] if best else ["-", "-"]),
            *(f"{figure:.3f}" if figure else "-" for figure in figures),
        ])  # fmt: skip
    return lines
