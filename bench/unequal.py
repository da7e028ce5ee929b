"""Collectives on some ranks of two emulated hosts, so that hosts have unequal numbers of ranks.

Plans as ``rv.plan`` makes them (``ours``), paths of primitives alone (``steps``) and gloo's own
collective take turns in one run. The bound is that of ``rv.plan`` for the rate that one TCP stream
reaches between the hosts just before. Needs root.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import rvdcomm as rv
from bench.cluster.emulated import Cluster, ClusterUnavailableError, parse_rate
from bench.command_line import above_zero, parser_for
from bench.result import environment, write
from bench.tables import grid
from rvdcomm.units import secs_text

RANKS_PER_HOST = 4
SUBSETS = {"4 + 2": 6, "4 + 3": 7, "4 + 1": 5}
"""Ranks on the two hosts, and how many take part."""

COLLECTIVES = {
    "all-reduce": ("R(1)V({n})D(1,1)", "R({n})V(1)D(1,1)"),
    "all-gather": ("R(1)V(1)D({n},1)", "R({n})V(1)D(1,1)"),
    "reduce-scatter": ("R(1)V({n})D(1,1)", "R(1)V(1)D({n},1)"),
    "D -> D'": ("R(1)V(1)D({n},1)", "R(1)V(1)D(1,{n})"),
}
INSIDE = rv.Link(20e-6, 2e9)
FAR_ALPHA_SECS = 300e-6
"""Of a message between namespaces; ``rvdcomm calibrate`` finds 0.2 to 0.4 ms."""

COLUMNS = 840
"""Divisible by all numbers of ranks."""


def measured(mib: float, bytes_per_sec: float, samples: int) -> Iterator[dict[str, Any]]:
    """The rows, on the ranks of this world; others than rank 0 get the same rows."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank = dist.get_rank()
    hosts = [range(RANKS_PER_HOST), range(RANKS_PER_HOST, 2 * RANKS_PER_HOST)]
    topology = rv.Topology.hosts(hosts, INSIDE, rv.Link(FAR_ALPHA_SECS, bytes_per_sec))
    rows = int(mib * (1 << 20) / 4 / COLUMNS) // COLUMNS * COLUMNS or COLUMNS
    for name, count in SUBSETS.items():
        ranks = list(range(count))
        group: Any = dist.new_group(ranks)
        for what, texts in COLLECTIVES.items():
            ends = [rv.Layout((rows, COLUMNS), t.format(n=count), ranks) for t in texts]
            plans = {
                "ours": rv.plan(*ends, "float32", topology),
                "steps": rv.plan(*ends, "float32", topology, trees=False),
            }
            if rank in ranks:
                shard = torch.ones(ends[0].cell(rank).box.shape)
                calls = {key: _call(rv.Redistributor(p), shard) for key, p in plans.items()}
                if what in GLOO:
                    calls["gloo"] = GLOO[what](shard, (rows, COLUMNS), group)
                yield {
                    "hosts": name,
                    "collective": what,
                    "bytes": 4 * rows * COLUMNS,
                    "steps": [step.kind for step in plans["ours"].path.steps],
                    "slices": plans["ours"].num_slices,
                    "bound_secs": plans["ours"].bound.secs,
                    "predicted_secs": plans["ours"].cost.secs,
                    "samples": _samples(calls, samples, group),
                }
        dist.barrier()
    dist.destroy_process_group()


def _call(run: rv.Redistributor, shard: Any) -> Callable[[], Any]:
    return lambda: run(shard)


def _all_reduce(shard: Any, shape: tuple[int, int], group: Any) -> Callable[[], Any]:
    import torch.distributed as dist

    return lambda: dist.all_reduce(shard.clone(), group=group)


def _all_gather(shard: Any, shape: tuple[int, int], group: Any) -> Callable[[], Any]:
    import torch
    import torch.distributed as dist

    whole = torch.empty(shape)
    return lambda: dist.all_gather_into_tensor(whole, shard, group=group)


def _all_to_all(shard: Any, shape: tuple[int, int], group: Any) -> Callable[[], Any]:
    """As a person would write it: blocks of columns out, and rows joined."""
    import torch
    import torch.distributed as dist

    def run() -> Any:
        count = dist.get_world_size(group)
        sent = torch.stack(list(shard.chunk(count, dim=1)))
        got = torch.empty_like(sent)
        dist.all_to_all_single(got, sent, group=group)
        return got.flatten(0, 1)

    return run


GLOO: Mapping[str, Callable[..., Callable[[], Any]]] = {
    "all-reduce": _all_reduce,
    "all-gather": _all_gather,
    "D -> D'": _all_to_all,
}
"""gloo has no reduce-scatter of its own that torch offers."""


def _samples(
    calls: Mapping[str, Callable[[], Any]], count: int, group: Any
) -> dict[str, list[float]]:
    """Seconds of each call between two barriers, in turn; the first of each is not counted."""
    import torch.distributed as dist

    found: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(count + 1):
        for name, call in calls.items():
            dist.barrier(group)
            start = time.perf_counter()
            call()
            dist.barrier(group)
            if i:
                found[name].append(time.perf_counter() - start)
    return found


def table(rows: list[dict[str, Any]]) -> str:
    """A line for each row: medians, and over the bound."""
    lines = [
        ["hosts", "", "bound", "ours", "x bound", "steps", "x bound", "gloo", "x bound", "plan"]
    ]
    for row in rows:
        found = {name: median(samples) for name, samples in row["samples"].items()}
        cells = []
        for name in ("ours", "steps", "gloo"):
            secs = found.get(name)
            cells += ["-", "-"] if secs is None else [
                secs_text(secs), f"{secs / row['bound_secs']:.2f}"
            ]  # fmt: skip
        kinds = row["steps"]
        lines.append([
            row["hosts"], row["collective"], secs_text(row["bound_secs"]), *cells,
            kinds[0] if len(kinds) == 1 else f"{len(kinds)} steps",
        ])  # fmt: skip
    return grid(lines)


def main(words: list[str]) -> int:
    """Run the command, or a rank of it."""
    parser = parser_for("unequal", __doc__)
    parser.add_argument("--rate", default="200mbit", help="of a host's link (default %(default)s)")
    parser.add_argument("--mib", type=above_zero, default=16.0, help="size (default: %(default)s)")
    parser.add_argument(
        "--samples", type=int, default=7, help="of each call (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("bench/results/unequal-200mbit.json"))
    parser.add_argument("--rank-of", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--bytes-per-sec", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.rank_of:
        rows = list(measured(args.mib, args.bytes_per_sec, args.samples))
        if rows and _rank() == 0:
            args.rank_of.write_text(json.dumps(rows))
        return 0
    try:
        with (
            Cluster(2, RANKS_PER_HOST, parse_rate(args.rate)) as cluster,
            tempfile.TemporaryDirectory() as folder,
        ):
            stream, file = cluster.measure_stream(), Path(folder, "rows.json")
            command = [sys.executable, "-m", "bench.unequal", "--mib", str(args.mib)]
            command += ["--samples", str(args.samples), "--rank-of", str(file)]
            cluster.run([*command, "--bytes-per-sec", str(stream)], timeout_secs=900)
            rows = json.loads(file.read_text())
    except ClusterUnavailableError as error:
        print(f"unequal: {error}", file=sys.stderr)
        return 2
    print(table(rows))
    known = environment("unequal", words)
    write({**known, "stream_bytes_per_sec": stream, "rows": rows}, args.out)
    return 0


def _rank() -> int:
    import os

    return int(os.environ["RANK"])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
