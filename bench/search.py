"""``python -m bench.search``: our planner beside all others, on the models that papers plan for."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import fsum
from pathlib import Path
from typing import Any

from tqdm import tqdm

import rvdcomm as rv
import superscaler_core as ss
from bench.run import environment
from bench.search_baselines import tuned_system
from bench.search_models import SEARCH_MODELS
from bench.studies import cluster
from bench.studies.study import ALPHAFOLD2, STUDIES
from bench.studies.systems import RECYCLE
from bench.studies.workload import Workload, captured, keep_graphs
from superscaler_core.planners.search.found import Found
from superscaler_core.planners.search.microbatches import Resizing
from superscaler_core.planners.search.offers import with_overlap
from superscaler_core.planners.search.request import Request, SearchPlanner, Trial
from superscaler_core.planners.search.search import search_request
from superscaler_core.planners.table import PLANNERS
from superscaler_core.units import secs_text

DESCRIPTION = """\
Search for a plan of every model by every planner, by shipped plans with the knobs that a person
would try, and by the systems of the studies, tuned over their own knobs. All plans are offered
overlap, and have the same cost model and memory. For each cell the ratio is the step of the best
other over that of auto: at least 1 if auto is never slower. Everything is simulated; nothing was
run on a GPU.
"""

EPILOG = """\
examples:
  python -m bench.search --quick                     # 4 and 8 GPUs
  python -m bench.search --cells gpt3-4,moe-2.4b     # cells whose names begin so
"""

SCRATCH = Path("bench/results/scratch/search")
"""What was searched so far, so that a run that is stopped goes on where it was."""


@dataclass(frozen=True)
class Cell:
    """A model on a number of GPUs.

    Attributes:
        name: of the model, its sizes and the GPUs.
        workload: what is trained.
        num_gpus: V100s.
        recycle: turns without gradient.
        baselines: planners beside those of the table, by name.
        topology: of the GPUs; that of the studies if None.
    """

    name: str
    workload: Workload
    num_gpus: int
    recycle: int
    baselines: Mapping[str, SearchPlanner]
    topology: rv.Topology | None = None

    @property
    def budget_secs(self) -> float:
        """What a search may take."""
        return 60.0 if self.num_gpus <= 16 else 300.0

    @property
    def planners(self) -> Mapping[str, SearchPlanner]:
        """All planners, ours first."""
        return {**PLANNERS, **self.baselines}

    def request(self) -> Request:
        """What every planner is asked."""
        batch = self.workload.batch
        sizes = tuple(n for n in range(1, batch + 1) if batch % n == 0)
        graphs = Resizing(Graphs(self.workload), sizes)
        return Request(
            graphs,
            sizes,
            batch,
            tuple(range(self.num_gpus)),
            self.topology or cluster.topology(self.num_gpus),
            cluster.profile(),
            cluster.limit_bytes(),
            master_dtype="float32",
            recycle=self.recycle,
            captured=graphs.as_captured,
        )


@dataclass(frozen=True)
class Graphs:
    """A workload's graphs; all processes share a folder of them."""

    workload: Workload

    def __call__(self, samples: int) -> ss.Graph:
        keep_graphs(SCRATCH / "graphs")
        return captured(self.workload, samples)


def cells() -> Iterator[Cell]:
    """Those of the studies, Alpa's and HiDup's; few GPUs first."""
    found = []
    for name, study in STUDIES.items():
        recycle = RECYCLE if study is ALPHAFOLD2 else 0
        systems = {system.name: tuned_system(system) for system in study.baselines}
        for num, workloads in study.workloads.items():
            for label, workload in workloads.items():
                text = f"{name}-{num}-{label}".replace(" ", "_")
                found.append(Cell(text, workload, num, recycle, systems))
    for name, model in SEARCH_MODELS.items():
        num = model.num_gpus
        found.append(Cell(f"{name}-{num}", model.workload, num, 0, model.baselines, model.topology))
    yield from sorted(found, key=lambda cell: cell.num_gpus)


def searched(cell: Cell, planner: str, num_processes: int, commit: str) -> dict[str, Any]:
    """What a planner finds; read again if this commit has searched for it before."""
    path = SCRATCH / f"{cell.name}-{planner}.json".replace(" ", "_")
    if path.exists() and "dirty" not in commit:
        kept: dict[str, Any] = json.loads(path.read_text())
        if kept["commit"] == commit:
            return kept
    propose = cell.planners[planner]
    with tqdm(desc=f"{cell.name} {planner}", unit="plan", leave=False, disable=None) as bar:
        try:
            found = search_request(
                cell.request(),
                propose if planner == "auto" else with_overlap(propose),
                budget_secs=cell.budget_secs,
                num_processes=num_processes,
                progress=partial(_show, bar),
            )
            row = _row(found)
        except ss.PlanError as error:
            row = {"problem": str(error)}
    row |= {"cell": cell.name, "gpus": cell.num_gpus, "planner": planner, "commit": commit}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(row))
    return row


def _show(bar: tqdm[Any], num_tried: int, num_waiting: int, best: Trial | None) -> None:
    bar.set_postfix_str("" if best is None else secs_text(best.secs), refresh=False)
    bar.update(1)


def _row(found: Found) -> dict[str, Any]:
    return {
        "plan": found.name,
        "secs": found.secs,
        "peak_bytes": found.peak_bytes,
        "tried": len(found.tried),
        "skipped": found.num_skipped,
        "left": found.num_left,
        "search_secs": found.search_secs,
    }


# --- results ------------------------------------------------------------------------------------


def ratio(rows: Sequence[Mapping[str, Any]], names: Sequence[str] = ()) -> float | None:
    """The best other step over auto's; None if one of both found nothing.

    Args:
        rows: of one cell.
        names: the others; all if empty.
    """
    secs = {row["planner"]: row["secs"] for row in rows if "secs" in row}
    others = [each for name, each in secs.items() if name != "auto" and name in (names or secs)]
    return min(others) / secs["auto"] if others and "auto" in secs else None


def table(rows: Sequence[Mapping[str, Any]], baselines: Sequence[str]) -> str:
    """A line a cell, and the means."""
    by_cell: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        by_cell.setdefault(row["cell"], []).append(row)
    lines = [
        f"{'cell':<30} {'auto':>9} {'search':>7} {'best other':>10}  {'ratio':>6} {'tuned':>6}"
    ]
    ratios, tuned = [], []
    for name, mine in by_cell.items():
        ours = next((row for row in mine if row["planner"] == "auto" and "secs" in row), None)
        others = [row for row in mine if row["planner"] != "auto" and "secs" in row]
        best = min(others, key=lambda row: row["secs"], default=None)
        found, against = ratio(mine), ratio(mine, baselines)
        ratios += [found] if found else []
        tuned += [against] if against else []
        lines.append(
            f"{name:<30} {secs_text(ours['secs']) if ours else '-':>9} "
            f"{ours['search_secs'] if ours else 0:6.0f}s "
            f"{secs_text(best['secs']) if best else '-':>10}  "
            f"{_text(found):>6} {_text(against):>6}  {best['planner'] if best else ''}"
        )
    if ratios:
        lines.append(f"least ratio {min(ratios):.3f}, cells below 1: {sum(r < 1 for r in ratios)}")
    if tuned:
        lines.append(f"mean over the best tuned baseline {fsum(tuned) / len(tuned):.3f}")
    return "\n".join(lines)


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.3f}"


def main(words: list[str]) -> int:
    """The command."""
    args = _parse(words)
    result = environment(shlex.join(["python", "-m", "bench.search", *words]))
    wanted = tuple(args.cells.split(",")) if args.cells else ("",)
    chosen = [
        cell
        for cell in cells()
        if cell.name.startswith(wanted) and (not args.quick or cell.num_gpus <= 8)
    ]
    rows = []
    for cell in tqdm(chosen, desc="cells", disable=None):
        names = args.planners.split(",") if args.planners else cell.planners
        for name in names:
            if name in cell.planners:
                rows.append(searched(cell, name, args.processes, result["commit"]))
    baselines = sorted({name for cell in chosen for name in cell.baselines})
    print(table(rows, baselines))
    args.out.write_text(
        json.dumps({**result, "baselines": baselines, "rows": rows}, indent=1) + "\n"
    )
    print(f"\n{args.out}")
    return 0


def _parse(words: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.search",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--cells", metavar="NAME,...", help="beginnings of cells' names")
    parser.add_argument("--planners", metavar="NAME,...", help="only these (default: all)")
    parser.add_argument("--quick", action="store_true", help="only 4 and 8 GPUs")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--out", type=Path, default=Path("bench/results/search.json"))
    return parser.parse_args(words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
