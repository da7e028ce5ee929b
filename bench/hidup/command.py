"""HiDup's evaluation: its models on its clusters, with HiDup's strategies and with other systems.

A row is a simulated step: its wall time, the computation and communication of a device, their sum
(the total), and HiDup's overlap, (total - wall) / min(computation, communication).
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import fsum
from pathlib import Path
from textwrap import fill
from typing import Any

import superscaler_core as ss
from bench.cells import dots
from bench.cells.cluster import PAPER
from bench.cells.searches import over, parse, run, save
from bench.cells.store import Job, Row
from bench.cells.workload import captured
from bench.command_line import parser_for
from bench.hidup.models import CLUSTERS, MODELS, SYSTEMS, num_gpus, topology_of, workload
from bench.tables import Lines, grid
from rvdcomm.units import bytes_text
from superscaler_core.cost import CostModel
from superscaler_core.published.hidup import (
    BEAM,
    FormPrices,
    FormStrategy,
    OurPrices,
    Prediction,
    PricedForms,
    PublishedPrices,
    hidup,
    least_secs,
)
from superscaler_core.simulator import simulate

DESCRIPTION = """\
HiDup's four models on its clusters: one machine of 4 V100s, two with 100 and with 30 Gbit/s between
them, and eight machines of 8 with 10 Gbit/s. Its strategies, found here, beside data parallel as in
PyTorch and Horovod, and experts dealt out as in FastMoE and DeepSpeed-MoE. Nothing was run on a
GPU. The published lines are those of HiDup's talk, which does not name their model.

columns: seconds of the step, computation and communication of a device, their sum as the total, and
the overlap: (total - wall) / min(computation, communication)
"""

EPILOG = """\
examples:
  python -m bench.hidup --clusters 2x4-30gbps --models bert-sgmoe
  python -m bench.hidup --kept                 # the tables of what was computed so far
"""

PUBLISHED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "1x4": {
        "HiDup": (0.2972, 0.2948, 0.0297),
        "DeepSpeed": (0.3988, 0.3531, 0.0282),
        "FastMoE": (0.3492, 0.2182, 0.1193),
    },
    "2x4-100gbps": {
        "HiDup": (0.3985, 0.3088, 0.1523),
        "DeepSpeed": (0.4993, 0.3479, 0.1347),
        "FastMoE": (0.6971, 0.2252, 0.4605),
    },
    "2x4-30gbps": {
        "HiDup": (0.6657, 0.3021, 0.4432),
        "DeepSpeed": (0.8251, 0.3469, 0.4585),
        "FastMoE": (0.7563, 0.2300, 0.5117),
    },
}
"""Seconds of (wall, computation, communication) in the paper's talk, which names no model."""


HIDUP, ITS_PRICES = "HiDup", "HiDup, its prices"
"""HiDup's planner with our costs, and with those of HiDup's own profile of the 8 x 8 cluster."""

PROFILED = "8x8-10gbps"

FEW = 3
"""Number of group names that are printed per cut."""


# --- computation --------------------------------------------------------------------------------


def jobs_of(clusters: Sequence[str], models: Sequence[str]) -> Iterator[Job]:
    """A job for every system on every cluster with every model."""
    for cluster in clusters:
        for model in models:
            for planner in (HIDUP, *[ITS_PRICES] * (cluster == PROFILED), *SYSTEMS):
                yield Job(f"{cluster} {model}", planner, 0.0)


def compute(cell: str, planner: str, _: float) -> dict[str, Any]:
    """The step of a system as a row of the result; the batch is not cut into microbatches."""
    cluster, model = cell.split()
    num = num_gpus(cluster)
    trained = workload(model, num)
    row = {"cell": cell, "gpus": num, "planner": planner, "left": 0}
    if planner in SYSTEMS:
        plan = ss.Plan(captured(trained, trained.batch), range(num))
        SYSTEMS[planner](plan)
        return row | _simulated(plan, cluster)
    graph = captured(trained, trained.batch // 2)
    prices: FormPrices = PublishedPrices(graph)
    if planner == HIDUP:
        prices = OurPrices(CostModel(graph, PAPER.profile, topology_of(cluster)))
    forms = PricedForms(prices, tuple(range(num)))
    strategy = hidup(forms.problem, most_calls=None, beam=BEAM)
    plan = ss.Plan(graph, range(num))
    forms.fill(plan, strategy)
    found = {
        "plan": in_words(forms, strategy),
        "predicted_secs": strategy.secs,
        "over_bound": strategy.secs / least_secs(forms.problem) - 1,
    }
    return row | _simulated(plan, cluster) | found


def in_words(forms: PricedForms, strategy: FormStrategy) -> str:
    """A strategy as text: the number of groups of ops per cut, and names of groups with rare cuts.

    The most common cut is given without names.
    """
    groups: dict[str, list[str]] = {}
    for call, number in zip(forms.problem.calls, strategy.signatures, strict=True):
        groups.setdefault(call.signatures[number].name, []).append(call.name)
    common = max(groups, key=lambda cut: len(groups[cut]))
    words = []
    for cut, names in groups.items():
        short = [*dict.fromkeys(re.sub(r"layers\.\d+\.", "", name) for name in names)]
        which = (
            "" if cut == common else f" ({', '.join(short[:FEW])}{', ...' * (len(short) > FEW)})"
        )
        words.append(f"{cut}: {len(names)}{which}")
    return f"{len(strategy.stages)} stages; " + "; ".join(words)


def _simulated(plan: ss.Plan, cluster: str) -> dict[str, Any]:
    made = ss.compile(plan, topology=topology_of(cluster))
    found = simulate(made, PAPER.profile)
    return {
        "secs": found.secs,
        "compute_secs": fsum(found.compute_secs.values()) / len(found.devices),
        "comm_secs": fsum(level.secs for level in found.levels),
        "peak_bytes": max(memory.total_bytes for memory in made.memory.values()),
    }


# --- output -------------------------------------------------------------------------------------


def overlap(wall_secs: float, compute_secs: float, comm_secs: float) -> float:
    """The overlap by HiDup's formula, but at least 0.

    The formula is negative for a device that mostly waits for others, because waiting is in the
    wall time only.
    """
    return max(0.0, Prediction(wall_secs, compute_secs, comm_secs).overlap)


def lines(cluster: str, rows: Sequence[Row]) -> Lines:
    """The break-down of the steps on a cluster, the published ones first."""
    texts = [
        ["model", "system", "wall", "total", "computation", "communication", "overlap",
         "predicted", "memory"],
    ]  # fmt: skip
    for name, secs in PUBLISHED.get(cluster, {}).items():
        texts.append(["published", name, *_breakdown(*secs), "", ""])
    for row in rows:
        predicted = f"{row['predicted_secs']:.4f}" if "predicted_secs" in row else ""
        secs = row["secs"], row["compute_secs"], row["comm_secs"]
        model = row["cell"].split()[1]
        memory = bytes_text(row["peak_bytes"])
        texts.append([model, row["planner"], *_breakdown(*secs), predicted, memory])
    return texts


def _breakdown(wall_secs: float, compute_secs: float, comm_secs: float) -> list[str]:
    secs = wall_secs, compute_secs + comm_secs, compute_secs, comm_secs
    return [f"{each:.4f}" for each in secs] + [f"{overlap(wall_secs, *secs[2:]):.1%}"]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw a dot for every cell and system: its step time over that of HiDup."""
    across = "step over that of HiDup"
    dots.draw(over(rows, HIDUP), path, across=across, title="Simulated", is_log=True)


def main(words: list[str]) -> int:
    """Print a break-down for every cluster, and HiDup's strategies."""
    args = _parse(words)
    jobs = [*jobs_of(args.clusters, args.models)]
    rows = run(args, jobs, compute)
    order = {(job.cell, job.planner): number for number, job in enumerate(jobs)}
    rows.sort(key=lambda row: order[row["cell"], row["planner"]])
    for cluster in args.clusters:
        mine = [row for row in rows if row["cell"].split()[0] == cluster]
        print(f"{cluster}\n{grid(lines(cluster, mine))}\n")
        for row in mine:
            if "plan" in row:
                bound = f"predicted at most {row['over_bound']:.1%} above the best strategy"
                print(fill(f"{row['cell']}, {row['planner']}: {row['plan']}; {bound}", 100))
        print()
    for cell, others in over(rows, HIDUP).items():
        factor = min((others[name] for name in SYSTEMS if name in others), default=None)
        print(f"{cell:<24} {'-' if factor is None else f'{factor:.3f}'} x the best system")
    return save(args, {"published": PUBLISHED, "rows": rows}, rows, partial(draw, rows))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = parser_for("hidup", DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("--clusters", nargs="+", choices=CLUSTERS, default=[*CLUSTERS], help="default: all")
    add("--models", nargs="+", choices=MODELS, default=MODELS, help="default: all")
    return parse(parser, words, out="bench/results/hidup.json")
