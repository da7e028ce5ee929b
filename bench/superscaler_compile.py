"""Time from a PyTorch model to one Python file per rank, and to a simulated step.

Every sample runs in a process of its own, so that nothing is cached, and on one core.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import cycle
from math import prod
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from bench.command_line import parser_for
from bench.result import environment, write

DESCRIPTION = """\
Compile a GPT (GPT-3's form, width 5120, 40 heads, 2048 tokens; no memory is allocated for it) with
the plan `hybrid`, by number of layers and of devices, 8 a host. Counted are, in seconds:
  capture      PyTorch model -> graph
  sprogram     graph -> plan: op_trans, op_assign and op_order of every op
  validate     all parts have devices, do all work once, and fit the devices' memory
  materialize  every communication, both ways, and the rvdcomm plan of each
  generate     the Python file of every rank, written to a folder
  files        all of these, from module to files
  simulate     a step of the program on V100s, with its memory over time
Not counted: imports, and building the modules.
"""

EPILOG = """\
examples:
  python -m bench.superscaler_compile                                # the table, a JSON and a plot
  python -m bench.superscaler_compile --layers 4 --devices 1,8 --repetitions 1
"""

COMPILING = ("capture", "sprogram", "validate", "materialize", "generate")
PHASES = (*COMPILING, "simulate")
WIDTH, HEADS, SEQUENCE, MICROBATCH = 5120, 40, 2048, 8
FIXED_LAYERS, FIXED_DEVICES = 48, 8
"""The number of layers while devices vary, and the number of devices while layers vary."""

PER_HOST = 8
"""Devices per host."""

LIMIT_BYTES = 1 << 60
"""Memory of a device, so large that every plan fits: only the time of the check matters."""

POINT_TIMEOUT_SECS = 900.0

T = TypeVar("T")


def grid_of(num_devices: int, num_layers: int) -> dict[str, int]:
    """Degrees of tensor, pipeline and data parallelism, doubled in turn until all devices are used.

    Tensor parallelism stays within a host, and a stage has at least one layer.

    >>> grid_of(8, 48), grid_of(8, 1), grid_of(1024, 48)
    ({'tp': 2, 'pp': 2, 'dp': 2}, {'tp': 4, 'pp': 1, 'dp': 2}, {'tp': 8, 'pp': 16, 'dp': 8})
    """
    counts, most = {"tp": 1, "pp": 1, "dp": 1}, {"tp": PER_HOST, "pp": num_layers}
    for name in cycle(counts):
        if prod(counts.values()) >= num_devices:
            break
        if 2 * counts[name] <= most.get(name, num_devices):
            counts[name] *= 2
    return counts


def points_of(layers: Iterable[int], devices: Iterable[int]) -> list[tuple[int, int]]:
    """(layers, devices) of all points: one varies while the other stays near its fixed value."""
    all_layers, all_devices = sorted(layers), sorted(devices)
    most = min(all_layers, key=lambda n: abs(n - FIXED_LAYERS))
    some = min(all_devices, key=lambda n: abs(n - FIXED_DEVICES))
    by_devices = [(most, n) for n in all_devices]
    return list(dict.fromkeys([*by_devices, *((n, some) for n in all_layers)]))


# --- one sample ---------------------------------------------------------------------------------


def sample(num_layers: int, num_devices: int) -> dict[str, Any]:
    """Compile once in this process; return the seconds of every phase and some sizes."""
    import torch

    from bench.cells.cluster import PAPER
    from superscaler_core.compiled import Compiled
    from superscaler_core.front_end import capture
    from superscaler_core.materialize import Materialized, materialize
    from superscaler_core.memory import check_memory
    from superscaler_core.models import GPT, GPTConfig
    from superscaler_core.plan import Plan, check_assigned, check_coverage
    from superscaler_core.plans import PLANS
    from superscaler_core.simulator import simulate

    secs = dict.fromkeys(PHASES, 0.0)

    def timed(phase: str, work: Callable[[], T]) -> T:
        start = time.perf_counter()
        result = work()
        secs[phase] += time.perf_counter() - start
        return result

    counts = grid_of(num_devices, num_layers)
    with torch.device("meta"):
        model = GPT(GPTConfig(sequence=SEQUENCE, layers=num_layers, width=WIDTH, heads=HEADS))
        inputs = [torch.empty(MICROBATCH, SEQUENCE, dtype=torch.int64) for _ in range(2)]
    graph = timed("capture", lambda: capture(model, tuple(inputs)))
    plan = Plan(graph, range(num_devices))
    options = {"tp": counts["tp"], "pp": counts["pp"], "microbatches": 4 * counts["pp"]}
    timed("sprogram", lambda: PLANS["hybrid"](plan, **options))

    def validate() -> None:
        check_assigned(plan)
        check_coverage(plan)

    def all_communication() -> tuple[Materialized, int]:
        made = materialize(plan, PAPER.topology(num_devices))
        sides = [
            sub_transfer
            for edge in made.edges.all
            for sub_transfer in (*edge.forward, *edge.backward)
        ]
        sides += [
            sub_transfer for use in made.weights.uses for sub_transfer in (*use.fetch, *use.reduce)
        ]
        moving = [sub_transfer for sub_transfer in sides if not sub_transfer.is_idle]
        for sub_transfer in moving:
            sub_transfer.plan()
        return made, len(moving)

    timed("validate", validate)
    made, num_transfers = timed("materialize", all_communication)
    timed("validate", lambda: check_memory(made, LIMIT_BYTES))
    compiled = Compiled(made)
    with tempfile.TemporaryDirectory() as folder:
        timed("generate", lambda: compiled.save(folder))
        num_bytes = sum(path.stat().st_size for path in Path(folder).iterdir())
    timed("simulate", lambda: simulate(compiled, PAPER.profile).live)
    return {
        "secs": secs,
        "ops": len(graph.ops),
        "transfers": num_transfers,
        "file_bytes": num_bytes,
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10,
    }


def measure(num_layers: int, num_devices: int, repetitions: int) -> dict[str, Any]:
    """Samples of one point, each from a process of its own."""
    command = [sys.executable, "-m", "bench.superscaler_compile", "--sample"]
    runs = [
        subprocess.run(
            [*command, f"{num_layers},{num_devices}"],
            stdout=subprocess.PIPE, text=True, check=True, timeout=POINT_TIMEOUT_SECS,
        )
        for _ in range(repetitions)
    ]  # fmt: skip
    found = [json.loads(run.stdout.splitlines()[-1]) for run in runs]
    return {
        "layers": num_layers,
        "devices": num_devices,
        **grid_of(num_devices, num_layers),
        "samples": {phase: [each["secs"][phase] for each in found] for phase in PHASES},
        **{name: found[0][name] for name in ("ops", "transfers", "file_bytes")},
        "peak_bytes": max(each["peak_bytes"] for each in found),
    }


# --- the result ---------------------------------------------------------------------------------

COLUMNS = ("layers", "devices", "dp/tp/pp", *COMPILING, "files", "simulate")


def cells_of(row: dict[str, Any]) -> tuple[str, ...]:
    """A row of the table."""
    *compiling, simulate = (median(row["samples"][phase]) for phase in PHASES)
    return (
        str(row["layers"]),
        str(row["devices"]),
        f"{row['dp']}/{row['tp']}/{row['pp']}",
        *(f"{value:.2f}" for value in (*compiling, files_secs(row), simulate)),
    )


def files_secs(row: dict[str, Any]) -> float:
    """Seconds from the module to the files of all ranks, median of the samples."""
    return median(map(sum, zip(*(row["samples"][phase] for phase in COMPILING), strict=True)))


def line_of(cells: Iterable[str]) -> str:
    """The cells as a line, aligned under ``COLUMNS``."""
    return "  ".join(cell.rjust(len(name)) for cell, name in zip(cells, COLUMNS, strict=True))


HEAD = f"median seconds\n{line_of(COLUMNS)}"


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A line per number of layers and of devices."""
    return "\n".join([HEAD, *(line_of(cells_of(row)) for row in rows)])


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw the time by devices and by layers, with a line per phase."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    most = max(row["layers"] for row in rows)
    (some,) = {row["devices"] for row in rows if row["layers"] != most} or {rows[0]["devices"]}
    panels = {
        "devices": ([row for row in rows if row["layers"] == most], f"{most} layers"),
        "layers": ([row for row in rows if row["devices"] == some], f"{some} devices"),
    }
    colours = ("#0072B2", "#E69F00", "#CC79A7", "#009E73", "#D55E00", "#56B4E9")
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.4), sharey=True, layout="constrained")
    for ax, (name, (mine, title)) in zip(axes, panels.items(), strict=True):
        ordered = sorted(mine, key=lambda row: row[name])
        counts = [row[name] for row in ordered]
        for phase, colour in zip(PHASES, colours, strict=True):
            values = [median(row["samples"][phase]) for row in ordered]
            ax.plot(counts, values, "o-", ms=4, color=colour, label=phase)
        ax.plot(counts, [files_secs(row) for row in ordered], "k--", label="module to files")
        ax.set(xscale="log", yscale="log", xlabel=name, title=title)
        ax.set_xticks(counts, map(str, counts))
        ax.minorticks_off()
        ax.grid(alpha=0.3)
    axes[0].set_ylabel("seconds on one core")
    axes[0].legend(frameon=False, fontsize=8, ncols=2)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def parse_args(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_for("superscaler_compile", DESCRIPTION, EPILOG)
    parser.add_argument("--layers", default="1,2,4,8,16,32,48", help="default: %(default)s")
    parser.add_argument(
        "--devices", default="1,2,4,8,16,32,64,128,256,512,1024",
        help="powers of two (default: %(default)s)",
    )  # fmt: skip
    parser.add_argument("--repetitions", type=int, default=3, help="of a point (default 3)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/superscaler_compile.json"),
        help="result file; the plot lies beside it (default: %(default)s)",
    )
    # For the processes that this benchmark starts: print one sample of LAYERS,DEVICES as JSON.
    parser.add_argument("--sample", help=argparse.SUPPRESS)
    return parser.parse_args(words)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write a JSON file and a plot."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    if args.sample:
        print(json.dumps(sample(*map(int, args.sample.split(",")))))
        return 0
    counts = (tuple(map(int, text.split(","))) for text in (args.layers, args.devices))
    print(HEAD)
    rows = []
    for num_layers, num_devices in points_of(*counts):
        rows.append(measure(num_layers, num_devices, args.repetitions))
        print(line_of(cells_of(rows[-1])), flush=True)
    sizes = {"width": WIDTH, "heads": HEADS, "sequence": SEQUENCE, "microbatch": MICROBATCH}
    result = {**environment("superscaler_compile", words), "model": sizes, "rows": rows}
    write(result, args.out, partial(plot, rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
