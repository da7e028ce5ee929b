"""Cells: a study cut into systems on models, which processes tune side by side."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from tqdm import tqdm

from bench.studies import cluster
from bench.studies.study import STUDIES, Study
from bench.studies.tuning import outcomes

Cell = tuple[str, int, str, int]
"""A study's name, a GPU count, a model's label, and the number of a system."""


def tuned(name: str, gpus: Iterable[int], num_processes: int) -> dict[str, Any]:
    """All outcomes of a study."""
    study = STUDIES[name]
    cells = list(_cells(name, study, gpus))
    # The largest first, so that none is left alone at the end.
    context = multiprocessing.get_context("spawn")
    with context.Pool(num_processes, maxtasksperchild=1) as pool:
        found = pool.imap(_outcomes, cells[::-1], chunksize=1)
        rows = list(tqdm(found, total=len(cells), desc=name, disable=None))[::-1]
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
    """What one process does."""
    name, count, label, number = cell
    study = STUDIES[name]
    workload = study.workloads[count][label]
    return [o.to_json() for o in outcomes(workload, count, study.systems[number])]
