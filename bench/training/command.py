"""``python -m bench.training``: real training by our plans and by torch's own methods."""

from __future__ import annotations

import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from textwrap import fill
from typing import Any

from tqdm import tqdm

from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.cluster.local import run_here
from bench.command_line import parser_for
from bench.result import environment, write
from bench.tables import grid

DESCRIPTION = """\
Train small models (float32, SGD with momentum) on gloo processes of this machine, by our plans and
by torch's own ways: the same weights and data, in one process group, step by step in turn. The
losses of the first 6 steps have to agree to 1e-5. Ours is the plan that a search finds on the
profile of this machine that the same processes measure just before, and a race of the fastest
(bench/machine/machine.py).
  auto       superscaler_core as users run it: ranks of one host share memory
  NAME       a shipped plan; `NAME+` with overlap; `... messages` with messages of gloo alone
  ddp        DistributedDataParallel
  fsdp2      fully_shard of every block and of the model
  pipeline   torch.distributed.pipelining, 1F1B, of two stages, whose ranks cut blocks by DTensor;
             they share rows by DDP where DTensor cannot cut a block (convolutions)
  tensor     DTensor's tensor parallel over all ranks
A cell that is done is not done again by the same commit, so a run that is stopped goes on.

columns:
  ms         a step with its optimizer, of the slowest rank: the median, least and most
  x torch    time of the fastest of torch over this one
  cpu ms     processor time of a rank in a step, mean of the ranks and the median of steps
  MiB sent   through TCP in a step, mean of the ranks, as the kernel counts it
  planned    the same by the plans of our transfers, through TCP or shared memory
  peak MiB   what building and two steps add to the memory of the largest rank, by the kernel
"""

EPILOG = """\
examples:
  python -m bench.training
  python -m bench.training --workloads gpt --ranks 4 --steps 5 --plans 'data_parallel+,zero3'
  python -m bench.training --cluster 2x2 --rates 200mbit,500mbit --workloads gpt \\
      --plans 'data_parallel,data_parallel+,zero3,zero3+' --against ddp,fsdp2   # needs root
"""

WORKLOADS = ("gpt", "moe", "wide_resnet", "llama")
AGAINST = ("ddp", "fsdp2", "pipeline", "tensor")
SCRATCH = Path("bench/results/scratch/training")
TIMEOUT_SECS = 600.0


def parse_args(words: list[str]) -> Namespace:
    """Parse the command line."""
    parser = parser_for("training", DESCRIPTION, EPILOG)
    for name, chosen, text in (
        ("workloads", ",".join(WORKLOADS), "models"),
        ("ranks", "4,8", "numbers of processes"),
        ("plans", "auto,auto messages", "ours"),
        ("against", ",".join(AGAINST), "torch's"),
    ):
        parser.add_argument(f"--{name}", default=chosen, help=f"{text} (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=15, help="timed (default %(default)s)")
    parser.add_argument("--budget", type=float, default=15, help="of a search (default 15 s)")
    parser.add_argument("--tiny", action="store_true", help="the smallest models, to try it out")
    parser.add_argument(
        "--cluster",
        metavar="HxR",
        help="emulate H hosts of R ranks each, in place of --ranks (root)",
    )
    parser.add_argument("--rates", default="200mbit", help="of a host's link (default %(default)s)")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/training.json"),
        help="result file (default: %(default)s)",
    )
    args = parser.parse_args(words)
    if not set(args.workloads.split(",")) <= set(WORKLOADS):
        parser.error(f"the workloads are {', '.join(WORKLOADS)}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure, print tables, and write a JSON file."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    result = environment("training", words)
    rates = args.rates.split(",") if args.cluster else []
    worlds = [f"{args.cluster} at {rate}" for rate in rates] or args.ranks.split(",")
    cells = [
        {
            "workload": workload,
            "world": world,
            "tiny": args.tiny,
            "plans": args.plans.split(","),
            "against": args.against.split(","),
            "steps": args.steps,
            "budget_secs": args.budget,
        }
        for world in worlds
        for workload in args.workloads.split(",")
    ]
    rows = []
    try:
        for cell in tqdm(cells, desc="cells", disable=None):
            rows.append(measured(cell, result["commit"]))
            print(table(rows[-1]), flush=True)
    except ClusterUnavailableError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(summary(rows))
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

COLUMNS = ("", "ms", "least", "most", "x torch", "cpu ms", "MiB sent", "planned", "peak MiB")


def ratio(row: Mapping[str, Any], name: str) -> float | None:
    """The fastest median of torch over that of a competitor; None if no method of torch ran."""
    medians = {each: median(seen["secs"]) for each, seen in row["competitors"].items()}
    torchs = [secs for each, secs in medians.items() if each in row["against"]]
    return min(torchs) / medians[name] if torchs else None


def table(row: Mapping[str, Any]) -> str:
    """A table with a line per competitor."""
    lines = [COLUMNS, *(_cells(row, name) for name in row["competitors"])]
    found = (fill(f"{name}: {plan}", 100) for name, plan in row["found"].items())
    return "\n".join([f"{row['workload']} on {row['world']} ranks", grid(lines), *found])


def summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per cell: the time of the fastest method of torch over that of each plan of ours."""
    names = rows[0]["plans"]
    lines = [("fastest of torch / ours", "ranks", *names)]
    for row in rows:
        lines.append((row["workload"], row["world"], *(_text(ratio(row, name)) for name in names)))
    return grid(lines)


def _cells(row: Mapping[str, Any], name: str) -> tuple[str, ...]:
    seen = row["competitors"][name]
    return (
        name,
        *(f"{1e3 * of(seen['secs']):.1f}" for of in (median, min, max)),
        _text(ratio(row, name)),
        f"{1e3 * median(seen['cpu_secs']):.1f}",
        _mib(seen["sent_bytes"]),
        _mib(row["planned_bytes"].get(name)),
        f"{max(seen['peak_bytes']) / 2**20:.1f}",
    )


def _text(number: float | None) -> str:
    return "-" if number is None else f"{number:.2f}"


def _mib(by_rank: Sequence[int] | None) -> str:
    return "-" if by_rank is None else f"{sum(by_rank) / len(by_rank) / 2**20:.2f}"
