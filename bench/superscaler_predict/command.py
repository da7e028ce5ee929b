"""Compare predicted with measured steps of plans that a search tried, on this machine's processes.

The machine is measured first: the links by ``rvdcomm`` calibrate, the ops by
``simulator.measured``, and the overheads of the runtime by steps of a tiny model.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.cluster.local import run_here
from bench.command_line import parser_for
from bench.result import environment, write
from bench.tables import grid

DESCRIPTION = """\
Search for plans of small models (float32, SGD with momentum) by the planner `auto`, on the profile
of this machine that is measured just before. The fastest by prediction run in a race, by a few
steps each, and its winner is chosen. Then train anew with all plans of the race and with others
that the search tried, down to slow ones, on gloo processes, all in turn; and compare the times and
the memory with those of superscaler_core.simulator. No figure is fitted to a step of these models.
A model that FILE already has is not measured again.

columns:
  others     share of the cores that other programs took in the steps that count
  measured   ms of a step with its optimizer, of the slowest rank: median of the steps
  predicted  the same, simulated
  error      predicted / measured - 1
  cpu        ms of the processor in a step, mean of the ranks: others on the machine hardly matter
  busy       the same, simulated: ms in which a rank would work if it had a core of its own
  MiB        the most that tensors take at one time on the rank that needs most, in two steps
"""

EPILOG = """\
examples:
  python -m bench.superscaler_predict
  python -m bench.superscaler_predict --models moe --plans 8 --rounds 3 --tried 20
"""

MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "batch": 8,
        "sizes": {"layers": 4, "width": 256, "heads": 8, "sequence": 128, "vocabulary": 1000},
    },
    "moe": {
        "batch": 16,
        "sizes": {
            "layers": 4, "width": 128, "heads": 4, "sequence": 64, "vocabulary": 500, "experts": 4
        },
    },
    "wide_resnet": {
        "batch": 16,
        "sizes": {
            "blocks": (2, 2), "base": 16, "width_factor": 4, "classes": 10, "image": 32
        },
    },
}  # fmt: skip

TIMEOUT_SECS = 1800.0

MALLOC = {
    "MALLOC_TRIM_THRESHOLD_": str(1 << 33),
    "MALLOC_MMAP_THRESHOLD_": str(1 << 33),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
"""Environment variables with which glibc keeps freed memory.

Otherwise a step would pay for its pages again whenever a plan of another model had used them; no
profile contains this cost.
"""


def parse_args(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_for("superscaler_predict", DESCRIPTION, EPILOG)
    parser.add_argument("--models", default=",".join(MODELS), help="default: all")
    parser.add_argument("--ranks", type=int, default=4, help="processes (default %(default)s)")
    parser.add_argument("--plans", type=int, default=24, help="of a model (default %(default)s)")
    parser.add_argument(
        "--rounds", type=int, default=7, help="of timed steps (default %(default)s)"
    )
    parser.add_argument(
        "--tried", type=int, default=80, help="plans that a search looks at (default %(default)s)"
    )
    parser.add_argument(
        "--op-secs", type=float, default=0.03, help="to measure an op (default %(default)s)"
    )
    parser.add_argument(
        "--out", type=Path, metavar="FILE",
        default=Path("bench/results/scratch/superscaler_predict.json"),
        help="result file, with a plot beside it (default: %(default)s)",
    )  # fmt: skip
    args = parser.parse_args(words)
    args.models = args.models.split(",")
    if not set(args.models) <= set(MODELS):
        parser.error(f"the models are {', '.join(MODELS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print tables, and write a JSON file and a plot."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    known = json.loads(args.out.read_text())["models"] if args.out.exists() else {}
    left = {name: MODELS[name] for name in args.models if name not in known}
    for name, found in measure(args, left) if left else ():
        known[name] = found
        given = environment("superscaler_predict", words)
        # Written after each model, because all of them take minutes.
        write({**given, "ranks": args.ranks, "models": known}, args.out, partial(plot, known))
    for name in args.models:
        print(f"{name}\n{table(known[name]['rows'])}\n")
    print(summary({name: known[name] for name in args.models}))
    return 0


def measure(
    args: argparse.Namespace, models: Mapping[str, Any]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run all plans of ``models`` in one group of processes; yields (model, result)."""
    shared = {name: getattr(args, name) for name in ("plans", "rounds", "tried", "op_secs")}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config").write_text(json.dumps({**shared, "models": models}))
        worker = [sys.executable, "-m", "bench.superscaler_predict.worker"]
        command = ["env", *(f"{key}={value}" for key, value in MALLOC.items()), *worker]
        try:
            run_here(
                args.ranks, [*command, str(folder / "config"), name], timeout_secs=TIMEOUT_SECS
            )
        finally:
            for path in sorted(folder.glob("*.json")):
                yield path.stem, json.loads(path.read_text())


# --- the tables ---------------------------------------------------------------------------------

COLUMNS = (
    "plan",
    "others",
    "measured",
    "predicted",
    "error",
    "cpu",
    "busy",
    "MiB",
    "predicted",
    "error",
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A table with a row per plan, fastest first; the chosen plan is marked."""
    ordered = sorted(rows, key=lambda row: median(row["step_secs"]))
    return grid([COLUMNS, *map(_cells, ordered)])


def summary(models: Mapping[str, Any]) -> str:
    """The places of the plans chosen by the race and by prediction alone, and median errors."""
    lines = []
    every = [row for found in models.values() for row in found["rows"]]
    for name, found in models.items():
        rows = found["rows"]
        (winner,) = (row for row in rows if row["is_chosen"])
        foreseen = min(rows, key=lambda row: row["predicted_secs"])
        lines += [
            f"{name}: {_medians(rows)}",
            f"  the chosen plan is {_place_text(winner, rows)}",
            f"  by prediction alone it would be {_place_text(foreseen, rows)}",
        ]
    return "\n".join([*lines, f"all {len(every)} plans: {_medians(every)}"])


def place(mine: dict[str, Any], rows: Sequence[dict[str, Any]]) -> tuple[int, int, float]:
    """(Place of a plan by its measured time, number of plans, its time over the fastest's)."""
    times = [median(row["step_secs"]) for row in rows]
    secs = median(mine["step_secs"])
    return 1 + sum(each < secs for each in times), len(rows), secs / min(times)


def _place_text(mine: dict[str, Any], rows: Sequence[dict[str, Any]]) -> str:
    number, num, ratio = place(mine, rows)
    return f"number {number} of {num}, {ratio:.3f} x the fastest"


def _medians(rows: Sequence[dict[str, Any]]) -> str:
    time, memory = (median(abs(errors(row)[i]) for row in rows) for i in (0, 1))
    return f"median error of time {time:.1%}, of peak memory {memory:.1%}"


def errors(row: dict[str, Any]) -> tuple[float, float]:
    """The relative errors of time and of peak memory."""
    secs, peak = median(row["step_secs"]), max(row["peak_bytes"])
    return row["predicted_secs"] / secs - 1, max(row["predicted_bytes"]) / peak - 1


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    time_error, memory_error = errors(row)
    return (
        ("> " if row["is_chosen"] else "  ") + row["name"],
        f"{row['others']:.0%}",
        f"{1e3 * median(row['step_secs']):.1f}",
        f"{1e3 * row['predicted_secs']:.1f}",
        f"{time_error:+.0%}",
        f"{1e3 * median(row['cpu_secs']):.1f}",
        f"{1e3 * sum(row['predicted_busy_secs']) / len(row['predicted_busy_secs']):.1f}",
        f"{max(row['peak_bytes']) / 2**20:.2f}",
        f"{max(row['predicted_bytes']) / 2**20:.2f}",
        f"{memory_error:+.0%}",
    )


def plot(models: Mapping[str, Any], path: Path) -> None:
    """Draw predicted against measured times of every model's plans."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import LogLocator, NullLocator

    figure, axes = plt.subplots(1, len(models), figsize=(4.2 * len(models), 4.4), squeeze=False)
    for axis, (name, found) in zip(axes[0], models.items(), strict=True):
        rows = found["rows"]
        times = [(1e3 * median(row["step_secs"]), 1e3 * row["predicted_secs"]) for row in rows]
        ends = [min(map(min, times)) / 1.15, max(map(max, times)) * 1.15]
        axis.plot(ends, ends, color="black", linewidth=1)
        axis.fill_between(
            ends, [0.85 * end for end in ends], [1.15 * end for end in ends],
            color="black", alpha=0.09, linewidth=0, label="±15 %",
        )  # fmt: skip
        axis.scatter(*zip(*times, strict=True), s=26, color="#0072B2", label="tried")
        mine = [pair for pair, row in zip(times, rows, strict=True) if row["is_chosen"]]
        axis.scatter(*zip(*mine, strict=True), s=70, marker="*", color="#D55E00", label="chosen")
        axis.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal", title=name)
        axis.set(xlabel="measured, median ms", ylabel="predicted, ms")
        for side in (axis.xaxis, axis.yaxis):
            side.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            side.set_major_formatter(lambda value, _: f"{value:g}")
            side.set_minor_locator(NullLocator())
        axis.grid(alpha=0.25)
        axis.legend(loc="upper left", frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)
