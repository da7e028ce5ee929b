"""``python -m bench.studies.sensitivity``: the effect of the least certain assumptions."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from bench.cells import dots
from bench.cells.cell import Cell
from bench.cells.cluster import Cluster
from bench.cells.searches import parse, run, save
from bench.cells.store import Job, Row
from bench.command_line import parser_for
from bench.studies.report import Compared
from bench.studies.study import STUDIES, TODAY, budget_of, cells
from bench.tables import grid
from superscaler_core.errors import PlanError

DESCRIPTION = """\
The studies' models on 16 GPUs, with other values of the three assumptions that are least certain:
how fast float32 is, how many bytes of a GPU are reserved, and which share of a host's NIC is
reached. For each value all systems are tuned anew, and auto searches anew, where it matters to the
dtype of the model; the factor is our speed over that of the best baseline of today. Every search
has 0.8 of --budget. Nothing was run on a GPU.
"""

NUM_GPUS = 16
"""The least number of GPUs on two hosts, so that the NIC matters."""

USUAL = "as assumed"


@dataclass(frozen=True)
class Change:
    """Another value of an assumption.

    Attributes:
        of: from the assumed cluster to the changed one.
        dtype: dtype of the models that the change affects; None if it affects all.
    """

    of: Callable[[Cluster], Cluster]
    dtype: str | None = None

    def matters_to(self, cell: Cell) -> bool:
        """Whether the change affects a cell, which is then computed again."""
        return self.dtype in (None, cell.workload.dtype)


def _float32(factor: float) -> Change:
    """Float32 products that are ``factor`` times as fast."""
    return Change(
        lambda known: replace(known, profile=known.profile.scaled(float32=factor)), "float32"
    )


def _reserved(gib: int) -> Change:
    return Change(lambda known: replace(known, reserved_bytes=gib << 30))


def _nic(factor: float) -> Change:
    """NICs whose reached rate is ``factor`` times as large."""

    def change(known: Cluster) -> Cluster:
        link = known.between
        return replace(known, between=replace(link, bytes_per_sec=factor * link.bytes_per_sec))

    return Change(change)


CHANGES: Mapping[str, Change] = {
    USUAL: Change(lambda known: known),
    "float32 x 0.8": _float32(0.8),
    "float32 x 1.2": _float32(1.2),
    "1 GiB reserved": _reserved(1),
    "4 GiB reserved": _reserved(4),
    "NIC x 0.5": _nic(0.5),
    "NIC x 1.1": _nic(1.1),
}
"""The changes of the cluster, by name."""

SIGN = "@"
"""The separator between cell and change in the names of jobs."""


def compute(name: str, planner: str, budget_secs: float) -> dict[str, Any]:
    """Compute the row of a planner for a cell with a change; ``name`` is cell, sign and change."""
    cell, _, change = name.partition(SIGN)
    known = cells()[cell]
    try:
        cluster = CHANGES[change].of(known.cluster)
    except PlanError as error:
        # The profile may have no shares of the dtype that the change is about.
        return {"cell": name, "gpus": known.num_gpus, "planner": planner, "problem": str(error)}
    changed = replace(known, name=name, cluster=cluster, pulled=())
    return changed.row(planner, budget_secs)


def compared(rows: Sequence[Row]) -> dict[str, dict[str, Compared]]:
    """The comparisons of our planner with the baselines, by model and change."""
    found: dict[str, dict[str, Compared]] = {}
    for name, study in STUDIES.items():
        for column, label, cell in study.cells(name):
            if column != TODAY or cell.num_gpus != NUM_GPUS:
                continue
            for change, value in CHANGES.items():
                wanted = f"{cell.name}{SIGN}{change if value.matters_to(cell) else USUAL}"
                mine = {row["planner"]: row for row in rows if row["cell"] == wanted}
                names = study.baselines[TODAY]
                one = Compared(TODAY, NUM_GPUS, label, study.ours[TODAY], names, mine)
                found.setdefault(f"{name} {label}", {})[change] = one
    return found


def lines(found: Mapping[str, Mapping[str, Compared]]) -> list[list[str]]:
    """The factor of every model with every change."""
    texts = [["model", *CHANGES]]
    for model, by_change in found.items():
        factors = [by_change[change].factor for change in CHANGES]
        texts.append([model, *(f"{x:.3f}" if x else "-" for x in factors)])
    return texts


def draw(found: Mapping[str, Mapping[str, Compared]], path: Path) -> None:
    """Draw a row per model: its factor as assumed, and with each change."""
    factors = {
        model: {change: one.factor for change, one in by_change.items() if one.factor}
        for model, by_change in found.items()
    }
    across = "our speed over that of the best baseline"
    dots.draw(factors, path, across=across, title=f"{NUM_GPUS} GPUs, simulated")


def main(words: list[str]) -> int:
    """Run the command."""
    args = _parse(words)
    chosen = [
        cell
        for name, study in STUDIES.items()
        for column, _, cell in study.cells(name)
        if column == TODAY and cell.num_gpus == NUM_GPUS
    ]
    jobs = [
        Job(
            f"{cell.name}{SIGN}{change}",
            planner,
            budget_of(cell, args.budget),
            cell.workload,
            num_gpus=cell.num_gpus,
        )
        for change, value in CHANGES.items()
        for cell in chosen
        if value.matters_to(cell)
        for planner in (*cell.first, *cell.systems)
    ]
    rows = run(args, jobs, compute)
    found = compared(rows)
    print(grid(lines(found)))
    return save(args, {"rows": rows}, rows, partial(draw, found))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = parser_for("studies.sensitivity", DESCRIPTION)
    return parse(parser, words, out="bench/results/sensitivity.json", budget_secs=75.0)


if __name__ == "__main__":
    # Imported by its name, so that ``compute`` can be pickled for other processes.
    from bench.studies import sensitivity

    sys.exit(sensitivity.main(sys.argv[1:]))
