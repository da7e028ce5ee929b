"""Duplex between hosts: half of the batch computes while the other half communicates."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from statistics import median
from typing import Any

from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.command_line import parser_for
from bench.result import environment, write
from bench.tables import grid

DESCRIPTION = """\
Train a mixture of experts (float32, SGD with momentum) by the plan `expert_parallel` on an emulated
cluster: two all-to-alls forward and two backward in every layer. The whole batch as one microbatch,
and its two halves by duplex; their losses have to agree to 1e-5 before anything is timed. Both run
in the same processes, alternating step by step.

Nearly all computing is a wait of a known time (bench/machine/waiting.py), because
the ranks share this machine's cores: real computing of four ranks on two cores would leave no core
to communicate.

columns:
  serial     ms of forward and backward with all communication, of the slowest rank, the median
  comm       ms that ranks wait for communication in it, mean of the ranks; and its share of serial
  duplex     ms of the same step in two halves
  hidden     (serial - duplex) / min(comm, serial - comm): the time that is hidden, over the time
             that could be hidden, as the shorter of computing and communication can be
  predicted  the same four by the simulator, with links calibrated and ops measured just before
"""

EPILOG = """\
examples:
  python -m bench.superscaler_duplex                             # needs root
  python -m bench.superscaler_duplex --rates 50mbit,400mbit --steps 20
"""

TIMEOUT_SECS = 1800.0


def parse_args(words: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_for("superscaler_duplex", DESCRIPTION, EPILOG)
    parser.add_argument("--cluster", default="2x2", help="hosts x ranks (default %(default)s)")
    parser.add_argument(
        "--rates", default="100mbit,150mbit,200mbit", help="of a host's link (default %(default)s)"
    )
    parser.add_argument("--batch", type=int, default=128, help="sequences of a step (default 128)")
    parser.add_argument("--steps", type=int, default=11, help="timed steps (default %(default)s)")
    parser.add_argument("--layers", type=int, default=3, help="default %(default)s")
    parser.add_argument(
        "--op-secs", type=float, default=0.3, help="to measure an op (default %(default)s)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("bench/results/scratch/superscaler_duplex.json"),
        help="result file (default: %(default)s)",
    )
    return parser.parse_args(words)


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table and write a JSON file; returns 2 if no cluster can be emulated."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    try:
        rows = [_measured(args, rate) for rate in args.rates.split(",")]
    except ClusterUnavailableError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    result = {
        **environment("superscaler_duplex", words),
        "cluster": args.cluster,
        "batch": args.batch,
        "layers": args.layers,
        "rows": rows,
    }
    print(table(result))
    write(result, args.out)
    return 0


def _measured(args: argparse.Namespace, rate: str) -> dict[str, Any]:
    """The row of measurements and predictions on links of a rate."""
    hosts, ranks_per_host = map(int, args.cluster.split("x"))
    with (
        Cluster(hosts, ranks_per_host, parse_rate(rate)) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        config, found = Path(folder, "config.json"), Path(folder, "found.json")
        given = {name: getattr(args, name) for name in ("batch", "steps", "layers", "op_secs")}
        config.write_text(json.dumps({**given, "folder": folder}))
        worker = [sys.executable, "-m", "bench.superscaler_duplex.worker"]
        cluster.run([*worker, str(config), str(found)], timeout_secs=TIMEOUT_SECS)
        return {"rate": rate, **json.loads(found.read_text())}


# --- the table ----------------------------------------------------------------------------------

COLUMNS = ("rate", "", "serial", "comm", "share", "duplex", "hidden")


def table(result: Mapping[str, Any]) -> str:
    """A table with two rows per rate: measured and predicted."""
    title = (
        f"mixture of experts of {result['layers']} layers, {result['batch']} sequences a step, on "
        f"{result['cluster']} ranks"
    )
    cells = [_cells(row, what) for row in result["rows"] for what in ("measured", "predicted")]
    return f"{title}\n{grid([COLUMNS, *cells])}"


def hidden(row: dict[str, Any], what: str) -> float:
    """The time that duplex hides over the time that could be hidden, measured or predicted."""
    serial, comm, both = _times(row, what)
    return (serial - both) / min(comm, serial - comm)


def _times(row: dict[str, Any], what: str) -> tuple[float, float, float]:
    """Seconds of the serial step, of its communication, and of the step in halves."""
    if what == "predicted":
        serial, both = row["predicted"]["serial"], row["predicted"]["duplex"]
        return serial["secs"], serial["comm_secs"], both["secs"]
    samples = row["samples"]
    return median(samples["serial"]), row["comm_secs"], median(samples["duplex"])


def _cells(row: dict[str, Any], what: str) -> tuple[str, ...]:
    serial, comm, both = _times(row, what)
    times = f"{1e3 * serial:.0f}", f"{1e3 * comm:.0f}", f"{comm / serial:.0%}", f"{1e3 * both:.0f}"
    return row["rate"], what, *times, f"{hidden(row, what):.0%}"
