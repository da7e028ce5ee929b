"""``python -m bench.studies.strong_scaling``: one GPT-3 on 4 to 256 GPUs, with RVD on and off."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from bench.cells.cell import PULLS, Cell
from bench.cells.searches import parse, run, save
from bench.cells.store import Job, Row
from bench.cells.workload import Workload
from bench.command_line import parser_for
from bench.studies.report import COLOURS
from bench.studies.systems import MEGATRON
from bench.tables import Lines, grid

DESCRIPTION = """\
Train one GPT-3 of 2.6 B parameters, 512 sequences of 2,048 tokens a step, on 4 to 256 simulated
V100s by tensor, pipeline and data parallel (Megatron's options, with sharded states and overlap),
tuned on every number of GPUs. Then move the same plan's tensors point-to-point, between stages,
inside stages, or both: every reader pulls what it needs from its writers. The last line is of plans
that are tuned for that. Nothing was run on a GPU.

columns: samples a second, and the speed-up over 4 GPUs with RVD
"""

NUM_GPUS = (4, 8, 16, 32, 64, 128, 256)

SIZES = {
    "layers": 32, "width": 2560, "heads": 32, "sequence": 2048, "vocabulary": 51200, "fused": False,
}  # fmt: skip

RVD, P2P = "rvd", "p2p"

LABELS: Mapping[str, str] = {
    RVD: "RVD",
    "inter": "p2p between stages",
    "intra": "p2p inside stages",
    "both": "p2p in both",
    P2P: "p2p in both, tuned for it",
}
"""How tensors move: labels by method, or by the place of point-to-point moves (``PULLS``)."""


def cells() -> Mapping[str, Cell]:
    """A cell for every number of GPUs and each method, by name."""
    workload, systems = Workload("gpt", SIZES, "float16", 512), {MEGATRON.name: MEGATRON}
    pulled = {RVD: (MEGATRON.name,), P2P: ()}
    found = [
        Cell(f"strong-{num}-{method}", workload, num, systems, (), method, pulled=pulled[method])
        for num in NUM_GPUS
        for method in (RVD, P2P)
    ]
    return {cell.name: cell for cell in found}


def compute(cell: str, planner: str, budget_secs: float) -> dict[str, Any]:
    """Compute the row of a cell, given by its name."""
    return cells()[cell].row(planner, budget_secs)


def speeds(rows: Sequence[Row]) -> dict[str, dict[int, float]]:
    """Samples per second, by the way in which tensors move and by the number of GPUs."""
    found: dict[str, dict[int, float]] = {label: {} for label in LABELS}
    for row in rows:
        if "secs" not in row:
            continue
        method, batch = row["cell"].rsplit("-", 1)[1], row["samples_per_sec"] * row["secs"]
        found[method][row["gpus"]] = row["samples_per_sec"]
        for where in PULLS if method == RVD else ():
            found[where][row["gpus"]] = batch / row["pulled_secs"][where]
    return found


def lines(rows: Sequence[Row]) -> Lines:
    """Samples per second with the speed-up over the fewest GPUs with RVD, and the plan with RVD."""
    found = speeds(rows)
    texts = [["GPUs", *LABELS.values(), "plan with RVD"]]
    plans = {row["gpus"]: row.get("plan", "none fits") for row in rows if row["cell"].endswith(RVD)}
    first = found[RVD][min(found[RVD])] if found[RVD] else 1.0
    for num, plan in sorted(plans.items()):
        given = (found[label].get(num) for label in LABELS)
        cells = (f"{speed:.4g} ({speed / first:.1f} x)" if speed else "-" for speed in given)
        texts.append([str(num), *cells, plan])
    return texts


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the speed-up by number of GPUs, both logarithmic, with the line of linear speed-up."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = speeds(rows)
    least = min(found[RVD])
    figure, ax = plt.subplots(figsize=(7, 4.5), layout="constrained")
    nums = sorted({num for by_num in found.values() for num in by_num})
    ax.plot(nums, [num / least for num in nums], color="grey", lw=0.8, label="linear")
    for number, (label, by_num) in enumerate(found.items()):
        places = sorted(by_num)
        speedups = [by_num[num] / found[RVD][least] for num in places]
        style = "--" if label == P2P else "-"
        # Later lines are thinner, so that equal lines are all visible.
        width = max(1.5, 6 - 1.5 * number)
        ax.plot(
            places, speedups, style, marker="o", ms=2 + width, lw=width, color=COLOURS[number],
            label=LABELS[label],
        )  # fmt: skip
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(nums, [str(num) for num in nums])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.set(
        xlabel="V100s, 8 a host", ylabel=f"speed over {least} GPUs with RVD",
        title="GPT-3 2.6 B, 512 sequences a step, simulated",
    )  # fmt: skip
    ax.grid(alpha=0.3)
    ax.legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(words: list[str]) -> int:
    """Run the command."""
    args = _parse(words)
    jobs = [
        Job(cell.name, MEGATRON.name, args.budget, cell.workload, num_gpus=cell.num_gpus)
        for cell in reversed([*cells().values()])
        if cell.num_gpus in args.gpus
    ]
    rows = run(args, jobs, compute)
    print(grid(lines(rows)))
    return save(args, {"rows": rows}, rows, partial(draw, rows))


def _parse(words: list[str]) -> argparse.Namespace:
    parser = parser_for("studies.strong_scaling", DESCRIPTION)
    parser.add_argument(
        "--gpus", type=lambda text: tuple(map(int, text.split(","))), default=NUM_GPUS,
        metavar="N,N", help="which numbers of GPUs (default: all)",
    )  # fmt: skip
    return parse(parser, words, out="bench/results/strong_scaling.json", budget_secs=60.0)


if __name__ == "__main__":
    # Imported by its name, so that ``compute`` can be pickled for other processes.
    from bench.studies import strong_scaling

    sys.exit(strong_scaling.main(sys.argv[1:]))
