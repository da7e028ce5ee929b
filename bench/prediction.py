"""Compare predicted with measured times of the 18 cases, on links calibrated just before.

On an emulated cluster, ``rvdcomm calibrate`` measures the links, all cases are planned for these
links, and rvdcomm runs the plans, all within minutes. ``plan.cost.secs`` is compared with the
median of the measured times. The command writes a JSON file and a plot, and prints a table.
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

from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.command_line import parser_for
from bench.result import environment, scratch_path, write
from bench.run import chosen, measure
from bench.rvd.cases import IN_GROUP, cluster_groups
from rvdcomm import Network
from rvdcomm.units import secs_text

Row = Mapping[str, Any]
"""A case with its predicted and measured time."""

BAND = 0.2
"""Target for the median of the absolute relative errors; the plot shows this band."""

EPILOG = """\
examples:
  python -m bench.prediction --cluster 2x4 --rate 200mbit             # needs root
  python -m bench.prediction --cluster 2x2 --rate 1gbit --sizes '1 MiB' --secs 0.2
"""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line; options shared with ``bench.run`` have the same names."""
    parser = parser_for("prediction", __doc__, EPILOG)
    parser.add_argument("--cluster", metavar="HxR", default="2x4", help="(default: %(default)s)")
    parser.add_argument("--rate", default="200mbit", help="of a host's link (default %(default)s)")
    parser.add_argument(
        "--sizes", default="64 KiB,1 MiB,16 MiB", help="comma separated (default: %(default)s)"
    )
    parser.add_argument("--executor", choices=["auto", "dist"], default="auto")
    parser.add_argument(
        "--secs", type=float, default=0.6, help="time budget of a case (default 0.6 s)"
    )
    parser.add_argument(
        "--repetitions", type=int, default=20, help="of a case at most (default 20)"
    )
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/scratch/)")
    args = parser.parse_args(argv)
    args.only, args.categories, args.relations = None, None, None
    args.methods = {"auto": "ours", "dist": "dist"}[args.executor]
    return args


def main(argv: list[str] | None = None) -> int:
    """Calibrate, measure, compare; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    try:
        result = _run(args)
    except ClusterUnavailableError as error:
        print(f"prediction: {error}", file=sys.stderr)
        return 2
    print(f"\n{result['title']}\n\n{table(result)}\n\n{summary(result)}")
    result = {**environment("prediction", words), **result}
    write(result, args.out or scratch_path(), partial(plot, result))
    return 0


def _run(args: argparse.Namespace) -> dict[str, Any]:
    hosts, ranks_per_host = (int(number) for number in args.cluster.split("x"))
    # Inside one group, R->R and R->D send nothing; their predictions would flatter the result.
    cases = [
        case
        for case in chosen(args, cluster_groups(hosts, ranks_per_host))
        if case.relation != IN_GROUP or not case.category.startswith("R")
    ]
    with (
        Cluster(hosts, ranks_per_host, parse_rate(args.rate)) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        calibrated = Path(folder, "calibrated.json")
        calibrate = [sys.executable, "-m", "rvdcomm", "calibrate", "--out", str(calibrated)]
        cluster.run([*calibrate, "--executor", args.executor], timeout_secs=600)
        topology = Network.load(calibrated).nearest_levels
        notes = json.loads(calibrated.read_text())["calibration"]

        def start(command: list[str], timeout_secs: float) -> None:
            cluster.run(command, timeout_secs=timeout_secs)

        rows = measure(args, cases, topology, start)
    return {
        "title": f"Predicted and measured: emulated cluster, {hosts} hosts x {ranks_per_host} "
        f"ranks, {args.rate}, gloo, executor {args.executor}",
        "calibration": notes,
        "rows": [_compared(row, args.methods) for row in rows],
    }


def _compared(row: dict[str, Any], method: str) -> dict[str, Any]:
    """A row of the benchmark with predicted and measured time and the relative error."""
    samples = row["samples"][method]
    return {
        **{name: row[name] for name in ("category", "relation", "size", "src", "dst", "steps")},
        "predicted_secs": row["cost_secs"],
        "measured_secs": median(samples),
        "samples": samples,
        "error": row["cost_secs"] / median(samples) - 1,
    }


def table(result: Mapping[str, Any]) -> str:
    """A table with a line per case."""
    head = f"{'case':16} {'size':>7}  {'predicted':>10} {'measured':>10} {'error':>6}  steps"
    lines = [head]
    for row in result["rows"]:
        secs = [secs_text(row[name]) for name in ("predicted_secs", "measured_secs")]
        lines.append(
            f"{row['category']:6}{row['relation']:10} {row['size']:>7}  {secs[0]:>10} "
            f"{secs[1]:>10} {row['error']:>+6.0%}  {', '.join(row['steps'])}"
        )
    return "\n".join(lines)


def summary(result: Mapping[str, Any]) -> str:
    """Absolute errors of the 18 cases, those in a group, and all: medians and the largest."""
    return "\n".join(
        f"{title}: median error {_by_size(rows)}; at most {max(abs(r['error']) for r in rows):.0%}"
        for title, rows in _parts(result["rows"])
    )


def _parts(rows: Sequence[Row]) -> Iterator[tuple[str, list[Row]]]:
    """The rows between groups, those in one group, and all, if there are any."""
    inside = [row for row in rows if row["relation"] == IN_GROUP]
    between = [row for row in rows if row["relation"] != IN_GROUP]
    parts = {"between groups": between, "in one group": inside, "all cases": [*rows]}
    yield from ((title, mine) for title, mine in parts.items() if mine)


def _by_size(rows: Sequence[Row]) -> str:
    sizes = dict.fromkeys(row["size"] for row in rows)
    parts = [f"{s} {median_error([r for r in rows if r['size'] == s]):.1%}" for s in sizes]
    return f"{median_error(rows):.1%} ({', '.join(parts)})"


def median_error(rows: Sequence[Row]) -> float:
    """The median of the absolute relative errors."""
    return float(median(abs(row["error"]) for row in rows))


COLOURS = {
    "R->R": "#0072B2",
    "R->D": "#56B4E9",
    "V->R": "#D55E00",
    "V->D": "#E69F00",
    "D->R": "#009E73",
    "D->D'": "#CC79A7",
}
MARKERS = "osD^v"


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw predicted against measured times, and the error of every case."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = result["rows"]
    sizes = list(dict.fromkeys(row["size"] for row in rows))
    names = list(dict.fromkeys((row["category"], row["relation"]) for row in rows))
    figure, (times, errors) = plt.subplots(1, 2, figsize=(12.4, 6.6))
    for row in rows:
        look = {
            "marker": MARKERS[sizes.index(row["size"]) % len(MARKERS)],
            "facecolors": "none",
            "edgecolors": COLOURS[row["category"]],
            "linewidths": 1.5,
            "s": 44,
        }
        times.scatter(row["measured_secs"] * 1e3, row["predicted_secs"] * 1e3, **look)
        errors.scatter(row["error"] * 100, names.index((row["category"], row["relation"])), **look)

    found = [row[name] * 1e3 for row in rows for name in ("measured_secs", "predicted_secs")]
    ends = [min(found) / 1.6, max(found) * 1.6]
    low, high = ([end * (1 + side * BAND) for end in ends] for side in (-1, 1))
    times.plot(ends, ends, color="black", linewidth=1)
    times.fill_between(ends, low, high, color="black", alpha=0.09, linewidth=0)
    times.set(xscale="log", yscale="log", xlim=ends, ylim=ends, aspect="equal")
    times.set(xlabel="measured, median ms", ylabel="predicted, ms")
    times.legend(handles=_legend(sizes), loc="upper left", frameon=False, fontsize=9)

    errors.axvspan(-100 * BAND, 100 * BAND, color="black", alpha=0.09, linewidth=0)
    errors.axvline(0, color="black", linewidth=1)
    errors.set_yticks(
        range(len(names)), [f"{category}  {relation}" for category, relation in names]
    )
    errors.invert_yaxis()
    errors.set_xlabel("error: (predicted - measured) / measured, %")
    for axis in (times, errors):
        axis.grid(alpha=0.25)
        axis.set_axisbelow(True)
    figure.suptitle(f"{result['title']}\n{summary(result)}", fontsize=10)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _legend(sizes: list[str]) -> list[Any]:
    from matplotlib.lines import Line2D

    plain: dict[str, Any] = {"ls": "", "mfc": "none", "color": "black"}
    return [
        *(Line2D([], [], ls="", marker="o", color=c, label=name) for name, c in COLOURS.items()),
        *(Line2D([], [], marker=m, label=s, **plain) for m, s in zip(MARKERS, sizes, strict=False)),
        Line2D([], [], color="black", alpha=0.2, linewidth=8, label=f"±{BAND:.0%}"),
    ]


if __name__ == "__main__":
    sys.exit(main())
