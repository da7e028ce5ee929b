"""``python -m bench.training``: real training by our plans and by torch's own methods."""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import ArgumentTypeError, Namespace
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from tqdm import tqdm

from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.cluster.local import run_here
from bench.command_line import above_zero, at_least_one, parser_for
from bench.result import environment, write
from bench.tables import grid
from bench.training.competitors import PAIRS
from bench.training.ours import FORMS, MESSAGES
from bench.training.torchs import WAYS
from superscaler_core.simulator.measured import num_cores_here

DESCRIPTION = """\
Train small models (float32, SGD with momentum) on gloo processes of this machine, by our plans and
by torch's own ways: the same weights and data, in one process group, step by step in turn. The
losses of the first 6 steps have to agree to 1e-5. Every plan and way is tuned first: its options
(bench/training/ours.py and torchs.py) race, the slower half leaves after each heat, and the fastest
trains.
  auto           the plan that a search finds on the profile of this machine that the same processes
                 measure just before, and a race of the fastest (bench/machine/machine.py)
  data_parallel  gradients reduced behind the backward, or during it in buckets   | ddp
  zero3          sharded weights, gathered again for the backward or not          | fsdp2
  pipelined      stages, microbatches, schedule; rows or features inside          | pipeline
  megatron       blocks cut over some ranks or all                                | tensor
  one            the whole batch in one process, of one or more threads; the others wait
The plans of ours on the left cut a model as the ways of torch on the right do. NAME messages is the
same with messages of gloo in place of memory that the ranks of a host share. waiting_gpt mostly
waits where a device would compute, so it needs no core: for emulated hosts.
A cell that is done is not done again by the same commit, so a run that is stopped goes on.

columns:
  ms         a step with its optimizer, of the slowest rank: the median, least and most
  x torch    time of the fastest way of torch on all ranks over this one
  x one      time of one process over this one
  cpu ms     processor time of all ranks in a step, the median of steps
  MiB sent   through TCP in a step, mean of the ranks, as the kernel counts it
  planned    the same by the plans of our transfers, through TCP or shared memory
  peak MiB   what building and two steps add to the memory of the largest rank, by the kernel
"""

EPILOG = """\
examples:
  python -m bench.training
  python -m bench.training --workloads gpt --ranks 4 --steps 5 --plans 'auto,zero3' --against fsdp2
  python -m bench.training --cluster 2x2 --rates 200mbit,500mbit --workloads waiting_gpt  # root
"""

WORKLOADS = ("gpt", "moe", "wide_resnet", "llama", "waiting_gpt")
PLANS = ("auto", *PAIRS)
AGAINST = ("one", *PAIRS.values())
SCRATCH = Path("bench/results/scratch/training")
TIMEOUT_SECS = 3600.0


def parse_args(words: list[str]) -> Namespace:
    """Parse the command line."""
    parser = parser_for("training", DESCRIPTION, EPILOG)
    plans = [*FORMS, *(f"{name}{MESSAGES}" for name in FORMS)]
    for name, known, chosen, text in (
        ("workloads", WORKLOADS, WORKLOADS[:-1], "models"),
        ("plans", plans, PLANS, "ours"),
        ("against", WAYS, AGAINST, "torch's"),
    ):
        parser.add_argument(
            f"--{name}", type=partial(_names, known), default=[*chosen], metavar="NAME,NAME",
            help=f"{text} (default: {','.join(chosen)})",
        )  # fmt: skip
    parser.add_argument(
        "--ranks", type=_counts, default=[max(2, num_cores_here())], metavar="N,N",
        help="numbers of processes, 2 or more (default: as many as cores)",
    )  # fmt: skip
    parser.add_argument(
        "--steps", type=at_least_one, default=15, help="timed (default: %(default)s)"
    )
    parser.add_argument(
        "--budget", type=above_zero, default=15.0, help="of a search (default: %(default)s s)"
    )
    parser.add_argument("--tiny", action="store_true", help="the smallest models, to try it out")
    parser.add_argument(
        "--cluster", type=_cluster, metavar="HxR",
        help="emulate H hosts of R ranks each, in place of --ranks (root)",
    )  # fmt: skip
    parser.add_argument(
        "--rates", type=_rates, default=["200mbit"], help="of a host's link (default: 200mbit)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/training.json"),
        help="result file (default: %(default)s)",
    )
    return parser.parse_args(words)


def _names(known: Collection[str], text: str) -> list[str]:
    found = text.split(",")
    if not set(found) <= set(known):
        raise ArgumentTypeError(f"expected some of {', '.join(known)}, got {text!r}")
    return found


def _counts(text: str) -> list[int]:
    found = [at_least_one(word) for word in text.split(",")]
    if min(found) < 2:
        raise ArgumentTypeError(f"expected 2 ranks or more, got {text!r}")
    return found


def _cluster(text: str) -> str:
    counts = [at_least_one(word) for word in text.split("x")]
    if len(counts) != 2 or prod(counts) < 2:
        raise ArgumentTypeError(f"expected hosts x ranks such as 2x2, got {text!r}")
    return text


def _rates(text: str) -> list[str]:
    for rate in text.split(","):
        try:
            parse_rate(rate)
        except ValueError as error:
            raise ArgumentTypeError(str(error)) from None
    return text.split(",")


def main(argv: list[str] | None = None) -> int:
    """Measure, print tables, and write a JSON file."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    result = environment("training", words)
    rates = args.rates if args.cluster else []
    worlds = [f"{args.cluster} at {rate}" for rate in rates] or [*map(str, args.ranks)]
    cells = [
        {
            "workload": workload,
            "world": world,
            "tiny": args.tiny,
            "plans": args.plans,
            "against": args.against,
            "steps": args.steps,
            "budget_secs": args.budget,
        }
        for world in worlds
        for workload in args.workloads
    ]
    rows = []
    try:
        for cell in tqdm(cells, desc="cells", disable=None):
            rows.append(measured(cell, result["commit"]))
            print(table(rows[-1]), flush=True)
    except ClusterUnavailableError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(f"{summary(rows)}\n\n{same_plans(rows)}")
    write({**result, "rows": rows}, args.out)
    return 0


def measured(cell: Mapping[str, Any], commit: str) -> dict[str, Any]:
    """The row of a cell; read from disk if this commit has measured the same cell before."""
    kept = SCRATCH / f"{cell['workload']}-{cell['world']}.json".replace(" ", "_")
    if kept.exists() and "dirty" not in commit:
        before: dict[str, Any] = json.loads(kept.read_text())
        if before["commit"] == commit and all(before[key] == cell[key] for key in cell):
            return before
    with tempfile.TemporaryDirectory() as folder:
        given, found = Path(folder, "config.json"), Path(folder, "found.json")
        given.write_text(json.dumps({**cell, "folder": folder}))
        command = [sys.executable, "-m", "bench.training.worker", str(given), str(found)]
        _run(cell["world"], command)
        row = {**cell, "commit": commit, **json.loads(found.read_text())}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(row))
    return row


def _run(world: str, command: list[str]) -> None:
    """Run a command on every rank of a world: ``"4"`` processes here, or ``"2x2 at 1gbit"``."""
    cluster, _, rate = world.partition(" at ")
    if not rate:
        run_here(int(world), command, timeout_secs=TIMEOUT_SECS)
        return
    hosts, ranks_per_host = map(int, cluster.split("x"))
    with Cluster(hosts, ranks_per_host, parse_rate(rate)) as emulated:
        emulated.run(command, timeout_secs=TIMEOUT_SECS)


# --- tables ---------------------------------------------------------------------------------------

COLUMNS = (
    "", "ms", "least", "most", "x torch", "x one", "cpu ms", "MiB sent", "planned", "peak MiB",
)  # fmt: skip
ONE = "one"

Row = Mapping[str, Any]


def secs_of(row: Row, name: str) -> float | None:
    """The median step of a competitor in seconds; None if it cannot train the model."""
    seen = row["competitors"].get(name)
    return median(seen["secs"]) if seen else None


def ratio(row: Row, name: str) -> float | None:
    """The fastest median of torch's ways on all ranks over that of a competitor, if there are."""
    found = (secs_of(row, each) for each in row["against"] if each != ONE)
    torchs, mine = [secs for secs in found if secs], secs_of(row, name)
    return min(torchs) / mine if torchs and mine else None


def same_plan_ratios(row: Row) -> dict[str, float]:
    """By our plan: the step of torch's way that cuts the model equally over ours."""
    found = {}
    for name, way in PAIRS.items():
        ours = [secs_of(row, each) for each in (name, f"{name}{MESSAGES}")]
        mine, torchs = min((secs for secs in ours if secs), default=None), secs_of(row, way)
        if mine and torchs:
            found[name] = torchs / mine
    return found


def table(row: Row) -> str:
    """A table with a line per competitor, and the option of each that won."""
    lines = [COLUMNS, *(_cells(row, name) for name in row["competitors"])]
    found = (fill(f"{name}: {plan}", 100) for name, plan in row["found"].items())
    return "\n".join([f"{row['workload']} on {row['world']} ranks", grid(lines), *found])


def summary(rows: Sequence[Row]) -> str:
    """A line per cell: the fastest way of torch on all ranks, over one process and each of ours."""
    names = [ONE, *rows[0]["plans"]]
    lines = [("fastest of torch on all ranks /", "ranks", *names)]
    for row in rows:
        lines.append((row["workload"], row["world"], *(_text(ratio(row, name)) for name in names)))
    return grid(lines)


def same_plans(rows: Sequence[Row]) -> str:
    """A line per cell: each way of torch over our plan that cuts the model equally; the median."""
    lines = [("torch / ours, same plan", "ranks", *PAIRS)]
    every = [same_plan_ratios(row) for row in rows]
    for row, ratios in zip(rows, every, strict=True):
        lines.append((row["workload"], row["world"], *(_text(ratios.get(x)) for x in PAIRS)))
    by_plan = ([ratios[name] for ratios in every if name in ratios] for name in PAIRS)
    lines.append(("median", "", *(_text(median(found) if found else None) for found in by_plan)))
    return grid(lines)


def _cells(row: Row, name: str) -> tuple[str, ...]:
    seen, one = row["competitors"][name], secs_of(row, ONE)
    secs, num_ranks = seen["secs"], len(seen["peak_bytes"])
    return (
        name,
        *(f"{1e3 * of(secs):.1f}" for of in (median, min, max)),
        _text(ratio(row, name)),
        _text(one / median(secs) if one else None),
        f"{1e3 * num_ranks * median(seen['cpu_secs']):.1f}",
        _mib(seen["sent_bytes"]),
        _mib(row["planned_bytes"].get(name)),
        f"{max(seen['peak_bytes']) / 2**20:.1f}",
    )


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _mib(by_rank: Sequence[int] | None) -> str:
    return "-" if by_rank is None else f"{sum(by_rank) / len(by_rank) / 2**20:.2f}"
