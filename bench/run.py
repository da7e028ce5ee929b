"""The RVD benchmark: 18 cases between two groups and 6 in one group, by one command.

The ranks are processes of this machine, or with ``--cluster`` those of an emulated cluster; with
``--network`` no process is started, and times are modelled. The command writes a JSON file with all
samples and a plot, and prints a table.
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
from bench.command_line import above_zero, at_least_one, parser_for
from bench.result import environment, scratch_path, write
from bench.rvd import picture, progress, report
from bench.rvd.cases import Case, Groups, cluster_groups, local_groups, make_cases
from rvdcomm import Layout, LayoutError, Link, Topology, plan
from rvdcomm.cli import UsageError, named_network

ALPHA_SECS = 60e-6
"""Latency of a gloo message between two processes of one host, from a ping-pong measurement."""

RUN_SECS, CASE_SECS = 120, 60
"""All ranks are ended after the first of these times and, for every case, the second."""

MESSAGE_SECS = 300
"""A rank that waits longer for a message ends the run."""

DESCRIPTION = """\
Run the RVD benchmark: 6 categories (R->R, R->D, V->R, V->D, D->R, D->D') for 3 relations of two
disjoint groups (n->n, n->2n, 2n->n), and the same 6 inside one group. Columns: rvdcomm,
point-to-point as SuperScaler's baseline (every reader pulls what it needs), DTensor where it can
express the case, the fastest of torch's own collectives called by hand inside one group, the
limit (the bytes that any plan must move over what plain TCP streams reach in the same run), and
ratios, of which P2P ÷ ours is the paper's. Lines "up to N x" give the largest P2P ÷ ours of each
category and of all cases. The plot has the form of the paper's Figure 17.
All methods alternate; times are the slowest rank's, medians of all samples.
"""

EPILOG = f"""\
what is limited:
  time of a case        --secs: no repetition starts later, but the first 3 always run
  time of a run         {RUN_SECS} s, and {CASE_SECS} s more for every case; then it fails
  time of a message     {MESSAGE_SECS} s; if a rank waits longer, the run fails
  rate of a link        --rate, on an emulated cluster alone
  memory                not limited; plans have no memory limit here
The column "limit" limits nothing: it is a time that no plan can beat.

how long it takes: bench/README.md

examples:
  python -m bench.run                                        # groups of 4 and 8 processes
  python -m bench.run --sizes '4 MiB' --only in-group --n 8  # one size, one group of 8
  python -m bench.run --cluster 2x4 --rate 200mbit --sizes '16 MiB'   # needs root
  python -m bench.run --network ndv2:2 --sizes '64 MiB'      # two hosts of V100s, modelled
"""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_for("run", DESCRIPTION, EPILOG)
    cases = parser.add_argument_group("cases")
    cases.add_argument(
        "--n",
        type=int,
        default=4,
        help="ranks of the smaller group (default 4); --cluster and --network have their own",
    )
    cases.add_argument(
        "--sizes",
        default="64 KiB,4 MiB,64 MiB",
        help="sizes of the whole tensor, comma separated (default: %(default)s)",
    )
    cases.add_argument("--only", choices=["in-group", "cross-group"], help="leave out the others")
    cases.add_argument("--categories", help="such as 'V->R,D->R' (default: all)")
    cases.add_argument("--relations", help="such as 'n->n,in group' (default: all)")
    where = parser.add_argument_group("where (default: processes of this machine)")
    either = where.add_mutually_exclusive_group()
    either.add_argument("--cluster", metavar="HxR", help="emulate H hosts of R ranks each")
    either.add_argument(
        "--network",
        metavar="WHAT",
        help="start no process, and print modelled times of ours and p2p on a network: a preset "
        "such as ndv2:2 or torus:4x4, or a file, as --topology of 'rvdcomm plan'; one group is "
        "the lower half of its ranks, the other one the upper half",
    )
    where.add_argument(
        "--rate",
        default="200mbit",
        help="with --cluster: the most that a host's link carries each way (default 200mbit)",
    )
    measuring = parser.add_argument_group("measuring (not with --network)")
    measuring.add_argument(
        "--methods",
        default="ours,pool,peer,dist,p2p,dtensor,torch,memcpy",
        help="default: %(default)s",
    )
    measuring.add_argument(
        "--secs",
        type=above_zero,
        default=0.6,
        help="time budget of a case, in seconds: no repetition of it starts later, except the "
        "first 3 (default 0.6)",
    )
    measuring.add_argument(
        "--repetitions",
        type=at_least_one,
        default=20,
        help="the most repetitions of a case, within --secs (default 20)",
    )
    parser.add_argument("--out", type=Path, help="result file (default: bench/results/scratch/)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    run = _on_network if args.network else _on_cluster if args.cluster else _on_this_machine
    started = time.monotonic()
    try:
        result = run(args)
    except (ClusterUnavailableError, LayoutError, UsageError) as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    result["wall_secs"] = time.monotonic() - started
    parts = (result["title"], report.table(result), report.LEGEND, report.up_to(result["rows"]))
    print(*filter(None, parts), sep="\n\n", end="\n\n")
    result = {**environment("run", words), **result}
    write(result, args.out or scratch_path(), partial(picture.plot, result))
    return 0


def _on_network(args: argparse.Namespace) -> dict[str, Any]:
    from bench.rvd.modelled import groups_on, rows_on  # Imported late: it imports torch.

    network = named_network(args.network)
    rows = list(rows_on(network, chosen(args, groups_on(network))))
    title = f"RVD benchmark: network {args.network}, {len(network.ranks)} ranks, modelled"
    return {"title": title, "times": "modelled", "methods": "ours,p2p", "rows": rows}


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


def chosen(args: argparse.Namespace, groups: Groups) -> list[Case]:
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
            "message_secs": MESSAGE_SECS,
        }
        config.write_text(json.dumps(values))
        results.touch()
        command = [sys.executable, "-m", "bench.rvd.worker", str(config), str(results)]
        done = threading.Event()
        watcher = threading.Thread(
            target=progress.watch, args=(results, len(cases), done), daemon=True
        )
        watcher.start()
        try:
            start(command, RUN_SECS + CASE_SECS * len(cases))
        finally:
            done.set()
            watcher.join()
        return [json.loads(line) for line in results.read_text().splitlines()]


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
