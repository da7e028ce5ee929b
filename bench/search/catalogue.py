"""Catalogue: all cells on which planners are compared, and the computation of a row."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from bench.cells.cell import Cell
from bench.search.models import SEARCH_MODELS
from bench.studies import study


@cache
def cells() -> Mapping[str, Cell]:
    """The cells of the studies, Alpa's and HiDup's, by name; cells with few GPUs first."""
    found = [*study.cells().values()]
    for name, model in SEARCH_MODELS.items():
        text = f"{name}-{model.num_gpus}"
        systems, cluster = model.baselines, model.cluster
        found.append(Cell(text, model.workload, model.num_gpus, systems, cluster=cluster))
    return {cell.name: cell for cell in sorted(found, key=lambda cell: cell.num_gpus)}


def compute(cell: str, planner: str, budget_secs: float, max_tried: int = 0) -> dict[str, Any]:
    """Compute the row of a cell and a planner, given by their names."""
    return cells()[cell].row(planner, budget_secs, max_tried)
