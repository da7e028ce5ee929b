"""Certificates: the bound of a cell is below the step of every plan that a result file has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.search.catalogue import cells
from superscaler_core.evaluation import LowerBound

RESULT = Path(__file__).parents[2] / "bench/results/search.json"
FILES = ("studies.json", "search-large.json")
"""Results whose rows have the bounds that the run computed."""

QUICK = ("gpt-2.6b-8", "wresnet-2b-8")
"""Cells whose models are captured in seconds."""


def rows_in(values: Any) -> Iterator[dict[str, Any]]:
    """All rows with a plan that are somewhere in a result."""
    if isinstance(values, dict) and {"cell", "planner", "secs"} <= values.keys():
        yield values
    elif isinstance(values, dict | list):
        for value in values.values() if isinstance(values, dict) else values:
            yield from rows_in(value)


def rows_of(cell: str) -> list[dict[str, Any]]:
    rows = json.loads(RESULT.read_text())["rows"]
    return [row for row in rows if row["cell"] == cell and "secs" in row]


@pytest.mark.parametrize("name", FILES)
def test_no_row_of_a_result_is_below_its_bound_or_another_planners(name: str) -> None:
    """The bound is that of the cell, so all planners' plans are above each of them."""
    rows = [*rows_in(json.loads((RESULT.parent / name).read_text()))]
    bounds: dict[str, list[float]] = {}
    for row in rows:
        if "bound_secs" in row:
            bounds.setdefault(row["cell"], []).append(row["bound_secs"])
    assert len(bounds) >= 10
    assert all(bound > 0 for found in bounds.values() for bound in found)
    # A cell of two columns has a bound for each.
    below = [(r["cell"], r["planner"]) for r in rows if r["secs"] < min(bounds.get(r["cell"], [0]))]
    below += [(r["cell"], r["planner"]) for r in rows if r["secs"] < r.get("bound_secs", 0.0)]
    assert below == []


@pytest.mark.parametrize("cell", QUICK)
def test_no_planner_is_faster_than_the_bound_of_a_cell(cell: str) -> None:
    """A row is a planner's best plan."""
    rows, bound = rows_of(cell), LowerBound(cells()[cell].request()).secs
    assert len(rows) > 3
    assert 0 < bound <= min(row["secs"] for row in rows)
