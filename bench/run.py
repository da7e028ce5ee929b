"""The RVD benchmark: 18 cases between two groups and 6 in one group, by one command.

The ranks are processes of this machine, or with ``--cluster`` those of an emulated cluster. The
command writes a JSON file with all samples and a plot, and prints a table.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import threading
import time
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from bench.cluster import stream
from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.cluster.local import run_here
from bench.command_line import parser_for
from bench.result import environment, scratch_path, write
from bench.rvd import report
from bench.rvd.cases import Case, cluster_groups, local_groups, make_cases
from rvdcomm import Layout, Link, Topology, plan

ALPHA_SECS = 60e-6
"""Latency of a gloo message between two processes of one host, from a ping-pong measurement."""

DESCRIPTION = """\
Run the RVD benchmark: 6 categories (R->R, R->D, V->R, V->D, D->R, D->D') for 3 relations of two
disjoint groups (n->n, n->2n, 2n->n), and the same 6 inside one group. Columns: rvdcomm,
point-to-point as SuperScaler's baseline (every reader pulls what it needs), DTensor where it can
express the case, the fastest of torch's own collectives called by hand inside one group, and the
limit: the bytes that any plan must move over what plain TCP streams reach in the same run.
All methods alternate; times are the slowest rank's, medians of all samples.
"""

EPILOG = """\
examples:
  python -m bench.run                                        # groups of 4 and 8 processes
  python -m bench.run --sizes '4 MiB' --only in-group --n 8  # one size, one group of 8
  python -m bench.run --cluster 2x4 --rate 200mbit --sizes '16 MiB'   # needs root
"""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_for("run", DESCRIPTION, EPILOG)
    parser.add_argument("--n", type=int, default=4, help="ranks of the smaller group (default 4)")
    parser.add_argument(
        "--sizes",
        default="64 KiB,4 MiB,64 MiB",
        help="sizes, comma separated (default: %(default)s)",
    )
    parser.add_argument("--only", choices=["in-group", "cross-group"], help="leave out the others")
    parser.add_argument("--categories", help="such as 'V->R,D->R' (default: all)")
    parser.add_argument("--relations", help="such as 'n->n,in group' (default: all)")
    parser.add_argument(
        "--methods",
        default="ours,pool,peer,dist,p2p,dtensor,torch,memcpy",
        help="default: %(default)s",
    )
    parser.add_argument("--cluster", metavar="HxR", help="emulate H hosts of R ranks each")
    parser.add_argument("--rate", default="200mbit", help="of every host's link (default 200mbit)")
    parser.add_argument("--secs", type=float, default=0.6, help="time for a case (default 0.6 s)")
    parser.add_argument("--repetitions", type=int, default=20, help="at most so many (default 20)")
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/scratch/)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    try:
        result = _on_cluster(args) if args.cluster else _on_this_machine(args)
    except ClusterUnavailableError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(result["title"], end="\n\n")
    print(f"{report.table(result)}\n\n{report.LEGEND}\n")
    result = {**environment("run", words), **result}
    write(result, args.out or scratch_path(), partial(report.plot, result))
    return 0


def _on_this_machine(args: argparse.Namespace) -> dict[str, Any]:
    groups = local_groups(args.n)
    cases = chosen(args, groups)
    world_size = 1 + max(max(rank for x in case.layouts for rank in x.ranks) for case in cases)
    bytes_per_sec = stream.loopback_stream(1.0)
    topology = Topology.single_host(world_size, ALPHA_SECS, bytes_per_sec)

    def start(command: list[str], timeout_secs: float) -> None:
        run_here(world_size, command, timeout_secs=timeout_secs)

    rows = measure(args, cases, topology, start)
    for row in rows:
        copied = row["samples"].get("memcpy")
        row["limit_secs"] = median(copied) if copied else None
    title = (
        f"RVD benchmark: {world_size} processes, {os.cpu_count()} cores, gloo, "
        f"one TCP stream {bytes_per_sec / 1e9:.2f} GB/s"
    )
    return _result(args, title, bytes_per_sec, rows)


def _on_cluster(args: argparse.Namespace) -> dict[str, Any]:
    hosts, ranks_per_host = (int(number) for number in args.cluster.split("x"))
    rate = parse_rate(args.rate)
    with Cluster(hosts, ranks_per_host, rate) as cluster:
        bytes_per_sec = cluster.measure_stream(1.0)
        blocks = [range(h * ranks_per_host, (h + 1) * ranks_per_host) for h in range(hosts)]
        inter = Link(ALPHA_SECS, bytes_per_sec)
        # Inside a host the streams of all ranks share the machine's cores.
        intra = Link(ALPHA_SECS, max(stream.loopback_stream(0.5) / ranks_per_host, bytes_per_sec))
        topology = Topology.hosts(blocks, intra, inter)
        cases = chosen(args, cluster_groups(hosts, ranks_per_host))

        def start(command: list[str], timeout_secs: float) -> None:
            cluster.run(command, timeout_secs=timeout_secs)

        rows = measure(args, cases, topology, start)
    free = Topology.hosts(blocks, Link(0, float("inf")), Link(0, bytes_per_sec))
    for row in rows:
        src, dst = Layout.parse(row["src"]), Layout.parse(row["dst"])
        row["limit_secs"] = plan(src, dst, "float32", free).bound.secs
    title = (
        f"RVD benchmark: emulated cluster, {hosts} hosts x {ranks_per_host} ranks, {args.rate}, "
        f"gloo, one TCP stream {bytes_per_sec * 8 / 1e6:.0f} Mbit/s"
    )
    return _result(args, title, bytes_per_sec, rows)


def chosen(args: argparse.Namespace, groups: dict[str, Any]) -> list[Case]:
    sizes = [size.strip() for size in args.sizes.split(",")]
    wanted = None if args.categories is None else set(args.categories.split(","))
    related = None if args.relations is None else set(args.relations.split(","))
    cases = [
        case
        for case in make_cases(groups, sizes)
        if args.only in (None, "in-group" if case.relation == "in group" else "cross-group")
        and (wanted is None or case.category in wanted)
        and (related is None or case.relation in related)
    ]
    if not cases:
        raise SystemExit("bench: no case is left by these options")
    return cases


def measure(
    args: argparse.Namespace, cases: list[Case], topology: Topology, start: Any
) -> list[dict[str, Any]]:
    """Start the ranks, show progress, and return a row per case."""
    with tempfile.TemporaryDirectory() as folder:
        config, results = Path(folder, "config.json"), Path(folder, "results.jsonl")
        topology.save(Path(folder, "topology.json"))
        values = {
            "cases": [case.to_json() for case in cases],
            "methods": args.methods.split(","),
            "topology": str(Path(folder, "topology.json")),
            "min_repetitions": 3,
            "max_repetitions": args.repetitions,
            "secs_a_case": args.secs,
        }
        config.write_text(json.dumps(values))
        results.touch()
        command = [sys.executable, "-m", "bench.rvd.worker", str(config), str(results)]
        done = threading.Event()
        watcher = threading.Thread(target=_progress, args=(results, len(cases), done), daemon=True)
        watcher.start()
        try:
            start(command, 120 + 60.0 * len(cases))
        finally:
            done.set()
            watcher.join()
        return [json.loads(line) for line in results.read_text().splitlines()]


def _progress(results: Path, total: int, done: threading.Event) -> None:
    """Show a bar of the finished cases on a terminal, and nothing elsewhere."""
    started = time.monotonic()
    if not sys.stderr.isatty():
        return
    while not done.wait(0.2):
        count = results.read_text().count("\n")
        bar = "#" * (30 * count // total)
        secs = time.monotonic() - started
        print(f"\r[{bar:<30}] {count}/{total} cases, {secs:.0f} s", end="", file=sys.stderr)
    print("\r" + " " * 70 + "\r", end="", file=sys.stderr)


def _result(
    args: argparse.Namespace, title: str, bytes_per_sec: float, rows: list[dict[str, Any]]
) -> dict[str, Any]:
    return {
        "title": title,
        "stream_bytes_per_sec": bytes_per_sec,
        "methods": args.methods,
        "rows": rows,
    }


if __name__ == "__main__":
    sys.exit(main())
