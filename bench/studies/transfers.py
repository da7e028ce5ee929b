"""RVD on and off: the studies' communication by rvdcomm's plans and point-to-point."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import rvdcomm as rv
import superscaler_core as ss
from bench.cases import make_cases
from bench.studies import cluster, report
from bench.studies.processes import side_by_side
from bench.studies.study import STUDIES
from bench.studies.systems import Way
from bench.studies.workload import compiled
from superscaler_core.cost.wire import TICKS_PER_SEC, Wires
from superscaler_core.program.transfer import Transfer

MODES = (("rvd", "rvd"), ("p2p", "rvd"), ("rvd", "p2p"), ("p2p", "p2p"))
"""How communication inside stages, and between stages, is done."""

SIZES = ("64 KiB", "4 MiB", "64 MiB")

GROUPS = {"n->n": (4, 4), "n->2n": (4, 8), "2n->n": (8, 4)}
"""GPUs of both groups, each on a host of its own; in a group of the second host too."""


def run(out: Path, num_processes: int) -> dict[str, Any]:
    """Both tables, and the JSON of them; reads the tuned ways of the other studies."""
    transitions = list(cases())
    _show_cases(transitions)
    # Those on most GPUs last.
    tuned = sorted((row for name in STUDIES for row in _tuned(out, name)), key=lambda r: r["gpus"])
    found = side_by_side(_simulated, tuned, num_processes, "transfers")
    rows = sorted(found, key=lambda row: [*STUDIES].index(row["study"]))
    _show_studies(rows)
    return {
        "study": "RVD on and off",
        "claim": {"inter": 57},
        "assumptions": list(cluster.ASSUMPTIONS),
        "cases": transitions,
        "rows": rows,
    }


# --- the 18 cases -------------------------------------------------------------------------------


def cases() -> Iterator[dict[str, Any]]:
    """Every case between two hosts, and those in one group of both, by both methods."""
    wires = Wires(cluster.topology(16))
    hosts = range(8), range(8, 16)
    groups: dict[str, tuple[Sequence[int], Sequence[int]]] = {
        name: (hosts[0][:a], hosts[1][:b]) for name, (a, b) in GROUPS.items()
    }
    groups["in group"] = (range(16), range(16))
    for case in make_cases(groups, SIZES):
        leg = Transfer(rv.Box.of_shape(case.layouts[0].shape), *case.layouts, "float32")
        if leg.is_idle:
            continue
        secs = {m: wires.of([leg], m).ticks / TICKS_PER_SEC for m in ("rvd", "p2p")}
        if not secs["p2p"]:
            continue  # every rank holds what it wants
        yield {**case.to_json(), "secs": secs}


def _show_cases(found: list[dict[str, Any]]) -> None:
    print("p2p over RVD: time of a transition between two hosts of V100s, port model\n")
    print(report.grid(case_lines(found)), "\n")
    print(f"{worst_text(found)}\n")


def case_lines(found: list[dict[str, Any]]) -> report.Lines:
    """How many times as long point-to-point takes, by case and size."""
    head = ["case", "groups", *SIZES]
    lines = [head]
    by_name = {(c["category"], c["relation"], c["size"]): c["secs"] for c in found}
    for category, relation in dict.fromkeys((c["category"], c["relation"]) for c in found):
        ratios = [by_name[category, relation, size] for size in SIZES]
        lines.append([category, relation, *(f"{s['p2p'] / s['rvd']:.2f}" for s in ratios)])
    return lines


def worst_text(found: list[dict[str, Any]]) -> str:
    """The largest of them between two groups, and the paper's."""
    worst = max(c["secs"]["p2p"] / c["secs"]["rvd"] for c in found if c["relation"] != "in group")
    return f"between groups up to {worst:.1f} x; the paper: up to 57 x"


# --- the studies --------------------------------------------------------------------------------


def _tuned(out: Path, name: str) -> Iterator[dict[str, Any]]:
    """The best way of every system of a study, as its result has it."""
    path = out / f"study_{name}.json"
    if not path.exists():
        print(f"{path} is missing: run `python -m bench.studies {name}` first; left out here.")
        return
    for row in json.loads(path.read_text())["rows"]:
        for system in STUDIES[name].systems:
            best = report.best_of(row["systems"].get(system.name, ()))
            if best is not None:
                yield {"study": name, "gpus": row["gpus"], "model": row["model"], "best": best}


def _simulated(tuned: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a step by all modes."""
    head = {key: tuned[key] for key in ("study", "gpus", "model")}
    study, best = STUDIES[head["study"]], tuned["best"]
    (system,) = (s for s in study.systems if s.name == best["system"])
    workload = study.workloads[head["gpus"]][head["model"]]
    way = Way(best["dp"], best["knobs"])
    program = compiled(workload, head["gpus"], system.sprogram, way, best["microbatch"])
    secs = [
        ss.simulate(program, cluster.profile(), intra=intra, inter=inter).secs
        for intra, inter in MODES
    ]
    return {**head, "system": system.name, "way": best["way"], "secs": secs}


def _show_studies(rows: list[dict[str, Any]]) -> None:
    print("Seconds of a step by RVD; times as long with p2p inside stages, between them, in both\n")
    print(report.grid(study_lines(rows)))


def study_lines(rows: list[dict[str, Any]]) -> report.Lines:
    """Seconds of a step with RVD, and how many times as long it takes without."""
    lines = [["study", "GPUs", "model", "system", "RVD", "intra p2p", "inter p2p", "both"]]
    for row in rows:
        base = row["secs"][0]
        lines.append([
            row["study"], str(row["gpus"]), row["model"], row["system"], f"{base:.4g}",
            *(f"{secs / base:.2f} x" for secs in row["secs"][1:]),
        ])  # fmt: skip
    return lines
