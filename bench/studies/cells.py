"""Cells: a study cut into systems on models, which processes tune side by side."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.run import environment
from bench.studies import cluster
from bench.studies.processes import side_by_side
from bench.studies.study import STUDIES, Study
from bench.studies.tuning import outcomes
from bench.studies.workload import keep_graphs

SCRATCH = Path("bench/results/scratch/studies")
"""What was tuned so far, so that a study that is stopped goes on where it was."""

Cell = tuple[str, int, str, int]
"""A study's name, a GPU count, a model's label, and the number of a system."""


def tuned(name: str, gpus: Iterable[int], num_processes: int) -> dict[str, Any]:
    """All outcomes of a study."""
    study = STUDIES[name]
    cells = list(_cells(name, study, gpus))
    rows = side_by_side(_outcomes, cells, num_processes, name)
    return {
        "study": study.title,
        "claim": study.claim,
        "ours": [system.name for system in study.ours],
        "assumptions": [*cluster.ASSUMPTIONS, *study.assumptions],
        "rows": [
            {
                "gpus": key[0],
                "model": key[1],
                "systems": {study.systems[cell[3]].name: row for cell, row in group},
            }
            for key, group in groupby(
                zip(cells, rows, strict=True), key=lambda pair: (pair[0][1], pair[0][2])
            )
        ],
    }


def _cells(name: str, study: Study, gpus: Iterable[int]) -> Iterator[Cell]:
    for count in gpus:
        for label in study.workloads[count]:
            for number in range(len(study.systems)):
                yield name, count, label, number


def _outcomes(cell: Cell) -> list[dict[str, Any]]:
    """What one process does; a cell that this commit has tuned before is read again."""
    name, count, label, number = cell
    study = STUDIES[name]
    system = study.systems[number]
    path = SCRATCH / f"{name}-{count}-{label}-{system.name}.json".replace(" ", "_")
    commit = environment("")["commit"]
    # Without a commit nothing says that what was kept is of this code.
    if "dirty" not in commit and commit != "unknown":
        keep_graphs(SCRATCH / "graphs" / commit)
        kept = json.loads(path.read_text()) if path.exists() else {}
        if kept.get("commit") == commit:
            return list(kept["outcomes"])
    workload = study.workloads[count][label]
    made = [o.to_json() for o in outcomes(workload, count, system)]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"commit": commit, "outcomes": made}))
    return made
