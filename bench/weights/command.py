"""Weight sync: send a model's weights from trainer ranks to inference ranks and back.

The ranks are processes of this machine, or with ``--cluster`` those of an emulated cluster. The
command prints a table, and with ``--out`` writes a JSON file with all samples.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench.cluster import stream
from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.cluster.local import run_here
from bench.command_line import parser_for
from bench.result import environment, write
from bench.run import ALPHA_SECS
from bench.weights.models import MODELS, MOE_MODELS
from rvdcomm import Topology
from rvdcomm.units import bytes_text

NUM_STREAMS = 3

DESCRIPTION = """\
Send the weights of a model (bfloat16) from trainer ranks to other, inference ranks, and back: a
Llama, tensor parallel on both sides, or a mixture of experts, whose dense weights are sharded over
a pipeline stage and become tensor parallel, and whose experts go from one rank to another.

Columns: redistribute_many (many), one redistribute a tensor (each), and what people write by hand:
gather every tensor, broadcast it, cut it (gather). All methods alternate in one run; every result
is checked bit for bit; times are the slowest rank's. On an emulated cluster, also the time that the
bytes of the busiest host's link take, and the time that the plan predicts on links that
``rvdcomm calibrate`` measured just before.
"""

EPILOG = """\
examples:
  python -m bench.weights                                  # 4 trainers, 2 readers, 7b / 16
  python -m bench.weights --executor dist --methods many,each
  python -m bench.weights --cluster 2x4 --rate 200mbit --methods many      # needs root
  python -m bench.weights --model moe-small --cluster 4x2 --readers-tp 2 --methods many
"""


def parse_args(argv: list[str]) -> argparse.Namespace:
    """Parse the command line."""
    parser = parser_for("weights", DESCRIPTION, EPILOG)
    parser.add_argument("--model", choices=[*MODELS, *MOE_MODELS], default="7b")
    parser.add_argument("--divisor", type=int, default=16, help="of the width (default 16)")
    parser.add_argument("--trainers", type=int, default=4, help="ranks that train (default 4)")
    parser.add_argument(
        "--stages", type=int, default=1, help="of the trainers' pipeline (default 1)"
    )
    parser.add_argument("--readers", type=int, default=2, help="ranks that infer (default 2)")
    parser.add_argument(
        "--readers-tp", type=int, help="tensor-parallel ranks of them (default all)"
    )
    parser.add_argument(
        "--memory-limit",
        type=int,
        default=8 << 20,
        help="bytes per rank, besides its shards (default 8 MiB)",
    )
    parser.add_argument("--executor", default="auto", help="auto, dist or peer (default auto)")
    parser.add_argument(
        "--methods",
        default="many,each,gather",
        help="``many`` and others to compare with it (default: %(default)s)",
    )
    parser.add_argument("--repetitions", type=int, default=7, help="default 7")
    parser.add_argument(
        "--cluster", metavar="HxR", help="emulate H hosts of R ranks; the first half of them train"
    )
    parser.add_argument("--rate", default="200mbit", help="of a host's link (default 200mbit)")
    parser.add_argument("--out", type=Path, help="result file (default: none)")
    args = parser.parse_args(argv)
    if "many" not in args.methods.split(","):
        parser.error(f"--methods {args.methods}: the others are compared with many; add it.")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the benchmark; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    args = parse_args(words)
    try:
        result = _on_cluster(args) if args.cluster else _here(args)
    except ClusterUnavailableError as error:
        print(f"bench: {error}", file=sys.stderr)
        return 2
    print(table(result))
    if args.out:
        write({**environment("weights", words), **result}, args.out)
    return 0


def _here(args: argparse.Namespace) -> dict[str, Any]:
    size = args.trainers + args.readers
    topology = Topology.single_host(size, ALPHA_SECS, stream.loopback_stream(1.0))
    rows = _measure(
        args,
        topology,
        lambda command, timeout_secs: run_here(size, command, timeout_secs=timeout_secs),
    )
    return _result(args, f"{size} processes on this machine", rows, None, topology)


def _on_cluster(args: argparse.Namespace) -> dict[str, Any]:
    hosts, ranks_per_host = (int(number) for number in args.cluster.split("x"))
    if hosts % 2:
        raise SystemExit("bench: half of the hosts train, half of them read: --cluster needs both")
    args.trainers = args.readers = ranks_per_host * hosts // 2
    args.stages = hosts // 2 if args.model in MOE_MODELS else 1
    with (
        Cluster(hosts, ranks_per_host, parse_rate(args.rate)) as cluster,
        tempfile.TemporaryDirectory() as folder,
    ):
        # The best of several streams: on a busy machine a single one may not fill the link.
        bytes_per_sec = max(cluster.measure_stream(1.0) for _ in range(NUM_STREAMS))
        calibrated = Path(folder, "calibrated.json")
        calibrate = [sys.executable, "-m", "rvdcomm", "calibrate", "--out", str(calibrated)]
        cluster.run([*calibrate, "--executor", args.executor], timeout_secs=600, echo=False)
        topology = Topology.load(calibrated)
        rows = _measure(
            args,
            topology,
            lambda command, timeout_secs: cluster.run(command, timeout_secs=timeout_secs),
        )
    title = (
        f"{hosts} hosts x {ranks_per_host} ranks, {args.rate}, one stream {bytes_per_sec:.3g} B/s"
    )
    return _result(args, title, rows, bytes_per_sec, topology)


def _measure(args: argparse.Namespace, topology: Topology, start: Any) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        config, results = Path(folder, "config.json"), Path(folder, "results.jsonl")
        topology.save(Path(folder, "topology.json"))
        values = {
            "model": args.model,
            "divisor": args.divisor,
            "trainers": args.trainers,
            "readers": args.readers,
            "stages": args.stages,
            "readers_tp": args.readers_tp or args.readers,
            "memory_limit": args.memory_limit,
            "executor": args.executor,
            "methods": args.methods.split(","),
            "repetitions": args.repetitions,
            "topology": str(Path(folder, "topology.json")),
        }
        config.write_text(json.dumps(values))
        command = [sys.executable, "-m", "bench.weights.worker", str(config), str(results)]
        start(command, 900.0)
        return [json.loads(line) for line in results.read_text().splitlines()]


def _result(
    args: argparse.Namespace,
    where: str,
    rows: list[dict[str, Any]],
    bytes_per_sec: float | None,
    topology: Topology,
) -> dict[str, Any]:
    for row in rows:
        row["limit_secs"] = bytes_per_sec and row["host_bytes"] / bytes_per_sec
    size = args.model if args.model in MOE_MODELS else f"llama {args.model} / {args.divisor}"
    title = (
        f"Weight sync: {size}, {args.trainers} trainers -> "
        f"{args.readers} readers, {args.executor}; {where}"
    )
    links = {level.name: asdict(level.link) for level in topology.levels}
    return {"title": title, "links": links, "rows": rows}


def table(result: Mapping[str, Any]) -> str:
    """Median times, their ratios to ``many``, the link's limit, and memory, as text."""
    lines = [result["title"], ""]
    for row in result["rows"]:
        times = {name: median(samples) for name, samples in row["samples"].items()}
        texts = [
            f"{name} {1e3 * secs:.1f} ms ({secs / times['many']:.2f}x)"
            for name, secs in times.items()
        ]
        peak = max(row["peak_bytes"])
        lines.append(f"{row['direction']:<6} {', '.join(texts)}")
        if row["limit_secs"]:
            error = row["predicted_secs"] / times["many"] - 1
            lines.append(
                f"       limit {1e3 * row['limit_secs']:.1f} ms, "
                f"many / limit {times['many'] / row['limit_secs']:.2f}; "
                f"predicted {1e3 * row['predicted_secs']:.1f} ms ({error:+.0%})"
            )
        lines.append(
            f"       {bytes_text(row['model_bytes'])}; largest shards of a rank "
            f"{bytes_text(row['largest_shards_bytes'])}, its peak {bytes_text(peak)}"
        )
    return "\n".join(lines)
