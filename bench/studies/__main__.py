"""``python -m bench.studies``: the paper's four studies on simulated V100s."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.cells.cell import Cell
from bench.cells.cluster import ASSUMPTIONS, GPUS
from bench.cells.searches import parse, run, save
from bench.cells.store import Job
from bench.command_line import parser_for
from bench.studies import one_gpu, report, transfers
from bench.studies.report import Compared
from bench.studies.study import COLUMNS, STUDIES, Study, budget_of, compute
from bench.tables import grid

DESCRIPTION = """\
The studies of the SuperScaler paper, simulated on up to 32 V100s (4 hosts of 8), in two columns:
the paper's plan against baselines with their features of 2022, and what auto finds against
baselines with all of today's features. Nothing here was run on a GPU.

  swin        Swin Transformer: co-shard
  gpt3        GPT-3 by length of the sequence: co-shard
  mbart       mBART: interlaced pipeline
  alphafold2  Evoformer: 3F1B
  memory      GPT-3 1.3 B on one GPU: memory by length of the sequence

All searches of a cell have the same processor time, so that other work of the machine does not
count: on 32 GPUs the whole --budget, on 16, 8 and 4 GPUs 0.8, 0.6 and 0.5 of it. A run that is
stopped goes on where it was. With all of the studies it writes a result, from which
"python -m bench.pages" makes the pages in docs/studies.
"""

EPILOG = """\
examples:
  python -m bench.studies swin --gpus 4           # minutes
  python -m bench.studies all                     # two and a half hours on two cores
"""

MEMORY = "memory"


def main(words: list[str]) -> int:
    """Run the command."""
    args = _parse(words)
    names = [*STUDIES, MEMORY] if "all" in args.studies else args.studies
    chosen = {name: STUDIES[name] for name in names if name in STUDIES}
    cells = [
        (name, column, label, cell)
        for name, study in chosen.items()
        for column, label, cell in study.cells(name)
        if cell.num_gpus in args.gpus
    ]
    jobs = [
        Job(
            cell.name,
            planner,
            budget_of(cell, args.budget),
            cell.workload,
            num_gpus=cell.num_gpus,
        )
        # Cells that take longest come first, so that all processes stay busy until the end.
        for *_, cell in sorted(cells, key=lambda each: -each[3].num_gpus)
        for planner in (*cell.first, *cell.systems)
    ]
    rows = run(args, jobs, compute)
    result: dict[str, Any] = {"assumptions": ASSUMPTIONS, "columns": COLUMNS, "studies": {}}
    for name, study in chosen.items():
        mine = [each[1:] for each in cells if each[0] == name]
        result["studies"][name] = _result(study, list(_compared(study, mine, rows)))
        _show(study, result["studies"][name])
    if MEMORY in names:
        jobs = [Job(MEMORY, method, 0.0) for method in one_gpu.METHODS]
        methods = run(args, jobs, one_gpu.compute)
        result[MEMORY] = {"notes": one_gpu.NOTES, "claim": one_gpu.CLAIM, "rows": methods}
        print(grid(one_gpu.memory_lines(methods)) if methods else "", "\n")
        rows += methods
    result["transfers"] = list(transfers.cases())
    if set(names) != {*STUDIES, MEMORY} or args.gpus != GPUS:
        print(f"{len(rows)} rows; only a run of all studies writes a result file")
        return 0
    return save(args, result, rows)


def _compared(
    study: Study, cells: Sequence[tuple[str, str, Cell]], rows: Sequence[Mapping[str, Any]]
) -> Iterator[Compared]:
    for column, label, cell in cells:
        mine = {row["planner"]: row for row in rows if row["cell"] == cell.name}
        yield Compared(
            column, cell.num_gpus, label, study.ours[column], study.baselines[column], mine
        )


def _result(study: Study, cells: Sequence[Compared]) -> dict[str, Any]:
    return {
        "title": study.title,
        "claim": study.claim,
        "differences": study.differences,
        "cells": [asdict(cell) for cell in cells],
    }


def _show(study: Study, result: Mapping[str, Any]) -> None:
    for column, text in COLUMNS.items():
        mine = [cell for cell in report.compared(result) if cell.column == column]
        print(f"{study.title}: samples a second; {text}\n")
        print(grid(report.speed_lines(mine)), "\n")
        print(f"factor {report.factors_text(mine)}; the paper: up to {study.claim} x\n")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = parser_for("studies", DESCRIPTION, EPILOG)
    parser.add_argument(
        "studies", nargs="+", choices=[*STUDIES, MEMORY, "all"], metavar="STUDY",
        help="one of the above, or all",
    )  # fmt: skip
    parser.add_argument(
        "--gpus", type=_counts, default=GPUS, metavar="N,N",
        help="which of 4,8,16,32 (default: all)",
    )  # fmt: skip
    return parse(parser, words, out="bench/results/studies.json", budget_secs=75.0)


def _counts(text: str) -> tuple[int, ...]:
    found = tuple(int(word) for word in text.split(","))
    if not set(found) <= set(GPUS):
        raise argparse.ArgumentTypeError(f"{text}: the studies are of {GPUS} GPUs.")
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
