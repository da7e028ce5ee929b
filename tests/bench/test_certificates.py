"""Certificates: the bound of a cell is below the step of every plan that a result file has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.search.catalogue import cells
from superscaler_core.evaluation import LowerBound

RESULT = Path(__file__).parents[2] / "bench/results/search.json"
QUICK = ("gpt-2.6b-8", "wresnet-2b-8")
"""Cells whose models are captured in seconds."""


def rows_of(cell: str) -> list[dict[str, Any]]:
    rows = json.loads(RESULT.read_text())["rows"]
    return [row for row in rows if row["cell"] == cell and "secs" in row]


@pytest.mark.parametrize("cell", QUICK)
def test_no_planner_is_faster_than_the_bound_of_a_cell(cell: str) -> None:
    """A row is a planner's best plan."""
    rows, bound = rows_of(cell), LowerBound(cells()[cell].request()).secs
    assert len(rows) > 3
    assert 0 < bound <= min(row["secs"] for row in rows)
