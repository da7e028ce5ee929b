"""Sections of pages about HiDup's evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from bench.cells.searches import over
from bench.hidup import command
from bench.hidup.models import CLUSTERS, SYSTEMS
from bench.pages.text import Pictures, Result, listed
from bench.tables import markdown


def first_screen(result: Result, pictures: Pictures) -> Iterator[str]:
    """The step time of the best other system over that of HiDup's strategy, for every cell."""
    rows = result["rows"]
    factors = {
        tuple(cell.split()): min(others[name] for name in SYSTEMS if name in others)
        for cell, others in over(rows, command.HIDUP).items()
    }
    models = list(dict.fromkeys(model for _, model in factors))
    lines = [["cluster", *models]]
    for cluster in dict.fromkeys(cluster for cluster, _ in factors):
        given = (factors.get((cluster, model)) for model in models)
        lines.append([cluster, *(f"{x:.2f} x" if x else "-" for x in given)])
    yield "Step of the best other system over that of the strategy that HiDup's planner finds:"
    yield markdown(lines)
    title = "Steps over that of HiDup's strategy"
    yield pictures.add("hidup", title, lambda path: command.draw(rows, path))


def tables(result: Result, pictures: Pictures) -> Iterator[str]:
    """The break-down of every cluster, and HiDup's strategies."""
    for cluster in CLUSTERS:
        mine = [row for row in result["rows"] if row["cell"].split()[0] == cluster]
        if not mine:
            continue
        yield f"### {cluster}"
        yield markdown(command.lines(cluster, mine))
        yield listed(
            f"{row['cell'].split()[1]}, {row['planner']}: {row['plan']}; predicted at most "
            f"{row['over_bound']:.1%} above the best strategy"
            for row in mine
            if "plan" in row
        )
