"""Placement planners on three published shapes of models, and the learning curves of the policy."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from bench.command_line import parser_for
from bench.placement.shapes import Machine, inception, nmt, rnnlm
from bench.result import environment, write
from superscaler_core.published.placement import (
    PlacementProblem,
    by_patterns,
    earliest_finish,
    every_placement,
    expert,
    integer_placement,
    min_cut,
)
from superscaler_core.published.placement.policy import learn_placement
from superscaler_core.space import Solution

DESCRIPTION = """\
Place operations of the shapes of an LSTM language model, NMT and Inception on 2 and 4 devices, by
every planner of superscaler_core.published.placement. All times are simulated; those of operations
are assumed. The best of all placements is known by enumeration. "chance" draws as many placements
as the policy, uniformly; its budget is the number of simulated placements.
"""

SLOW = {"latency_secs": 1e-3, "bytes_per_sec": 1e9}
"""Slow links, on which the time of messages dominates."""

EXPERT = by_patterns({"layer0.*": 0, "encoder.*": 0, "layer*": 1, "*": 1})
"""A placement by hand: device 0 has the first layer or the encoder, device 1 everything else.

An Inception is therefore on one device.
"""

CASES: dict[str, Callable[[], PlacementProblem]] = {
    "rnnlm, 2": lambda: rnnlm(Machine(2), steps=10, runs=5),
    "rnnlm, 4": lambda: rnnlm(Machine(4), steps=9, runs=3),
    "rnnlm slow, 2": lambda: rnnlm(Machine(2, **SLOW), steps=10, runs=5, cell_secs=1e-4),
    "nmt, 2": lambda: nmt(Machine(2), steps=6, runs=2),
    "nmt, 4": lambda: nmt(Machine(4), layers=1, steps=6, runs=2),
    "inception, 2": lambda: inception(Machine(2), blocks=4),
    "inception, 4": lambda: inception(Machine(4), blocks=2),
}
"""A shape and a number of devices each, small enough to try all placements."""


PANELS = 4
"""Panels per row of the picture."""


def speed_up(baseline_secs: float, secs: float) -> float:
    """The speed-up over a baseline as in the published tables: 0.235 means 23.5 % faster."""
    return baseline_secs / secs - 1


def place(problem: PlacementProblem, updates: int, seeds: int, tick: Callable[[], object]) -> Any:
    """Simulated seconds of a step for every planner, and the learning curves of the policy."""
    planners: dict[str, Callable[[], Solution]] = {
        "best of all": lambda: every_placement(problem),
        "one device": lambda: problem.solution([0] * len(problem.groups), "one device"),
        "expert": lambda: expert(problem, EXPERT),
        "min cut": lambda: min_cut(problem),
        "earliest finish": lambda: earliest_finish(problem),
        "integer, 20 s": lambda: integer_placement(problem, 20.0),
    }
    rows = {}
    for name, planner in planners.items():
        start = time.process_time()
        found = planner()
        rows[name] = {"secs": found.secs, "cpu_secs": time.process_time() - start}
        tick()
    start = time.process_time()
    learned = [
        learn_placement(problem, updates=updates, seed=seed, tick=tick) for seed in range(seeds)
    ]
    spent = (time.process_time() - start) / seeds
    budget = learned[0].num_samples
    drawn = np.random.default_rng(0).integers(0, problem.num_devices, (budget, len(problem.groups)))
    rows["chance"] = {"secs": float(problem.secs(drawn).min())}
    for seed, each in enumerate(learned):
        rows[f"policy, seed {seed}"] = {"secs": each.solution.secs, "cpu_secs": spent}
    hand = ("one device", "expert", "min cut")
    baseline = min(rows[name]["secs"] for name in hand)
    return {
        "operations": len(problem.operations),
        "groups": len(problem.groups),
        "devices": problem.num_devices,
        "placements": problem.num_devices ** len(problem.groups),
        "policy_samples": budget,
        "planners": rows,
        "speed_up": speed_up(baseline, min(each.solution.secs for each in learned)),
        "curves": [each.mean_secs for each in learned],
        "best_curves": [each.best_secs for each in learned],
    }


def table(cases: dict[str, Any]) -> str:
    """A table of step times over that of the best of all placements."""
    names = [*next(iter(cases.values()))["planners"]][1:]
    lines = [f"| | placements | samples | {' | '.join(names)} | speed-up |"]
    lines.append("|---" * (len(names) + 4) + "|")
    for case, found in cases.items():
        best = found["planners"]["best of all"]["secs"]
        over = [f"{found['planners'][name]['secs'] / best:.3f}" for name in names]
        counts = f"{found['placements']:,} | {found['policy_samples']:,}"
        lines.append(f"| {case} | {counts} | {' | '.join(over)} | {found['speed_up']:.1%} |")
    return "\n".join(lines)


def draw(cases: dict[str, Any], path: Path) -> None:
    """Draw the learning curves of the policy, relative to the best of all placements."""
    from matplotlib.figure import Figure

    figure = Figure((10, 2.6 * -(-len(cases) // PANELS)), layout="constrained")
    panels = list(figure.subplots(-(-len(cases) // PANELS), PANELS, squeeze=False).flat)
    for axes in panels[len(cases) :]:
        axes.set_axis_off()
    for axes, (case, found) in zip(panels, cases.items(), strict=False):
        best = found["planners"]["best of all"]["secs"]
        per_update = found["policy_samples"] / len(found["curves"][0])
        for mean, least in zip(found["curves"], found["best_curves"], strict=True):
            samples = per_update * np.arange(1, len(mean) + 1)
            axes.plot(samples, np.array(mean) / best, color="#4c9be8", linewidth=0.7, alpha=0.7)
            axes.plot(samples, np.array(least) / best, color="#e07a3f", linewidth=1.6)
        axes.axhline(1.02, color="#888888", linewidth=0.8, linestyle=":")
        axes.set_title(f"{case} devices", fontsize=10)
        axes.set_xlabel("simulated placements")
    for axes in figure.axes[::PANELS]:
        axes.set_ylabel("time over the best of all")
    handles = [figure.axes[0].lines[i] for i in (0, 1, -1)]
    figure.axes[0].legend(handles, ["mean of an update", "best so far", "2 %"], fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=90)


def parse_args(words: list[str]) -> argparse.Namespace:
    parser = parser_for("placement", DESCRIPTION)
    parser.add_argument("--out", type=Path, default=Path("bench/results/placement.json"))
    parser.add_argument("--image", type=Path, default=Path("docs/img/placement.png"))
    parser.add_argument("--updates", type=int, default=400, help="of 16 placements (%(default)s)")
    parser.add_argument("--seeds", type=int, default=3, help="policies of a case (%(default)s)")
    return parser.parse_args(words)


def main(argv: list[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    result = environment("placement", words)
    num_ticks = len(CASES) * (6 + args.updates * args.seeds)
    with tqdm(total=num_ticks, desc="placement", disable=None) as bar:
        result["cases"] = {
            name: place(make(), args.updates, args.seeds, bar.update)
            for name, make in CASES.items()
        }
    print(table(result["cases"]))
    write(result, args.out, partial(draw, result["cases"]), args.image)
    return 0
