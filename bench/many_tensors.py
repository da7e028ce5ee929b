"""How the time of redistribute_many grows with the number of tensors: small ones, on two ranks."""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from bench.cluster.ranks import Launch, run_ranks
from bench.command_line import parser_for
from bench.result import environment, write

DESCRIPTION = """\
Measure redistribute_many of many small tensors (4 x 6 float32, as the scales of a mixture of
experts are) between two ranks of one host: rows become columns.

  first   the first call, which plans and compiles: processor seconds of a rank (all its threads)
  warm    a later call: processor time per tensor, the median of seven calls
  out     the same with out=, views of one buffer; two buffers take turns
  memory  the largest resident memory of a rank until then

Figures are those of the slower rank. Every number of tensors has processes of its own.
"""

EPILOG = """\
examples:
  python -m bench.many_tensors                      # about two minutes
  python -m bench.many_tensors --counts 500 1000 --executors dist
  python -m bench.many_tensors --out bench/results/many_tensors.json
"""

TIMEOUT = timedelta(seconds=600)
COUNTS = (500, 1000, 2000, 4000, 10_000, 50_000)
CALLS = 7
SHAPE = (4, 6)
ENDS = "R(1)V(1)D(2,1)", "R(1)V(1)D(1,2)"


Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write a JSON file."""
    parser = parser_for("many_tensors", DESCRIPTION, EPILOG)
    parser.add_argument("--counts", type=int, nargs="+", default=list(COUNTS), metavar="N")
    parser.add_argument("--executors", nargs="+", default=["auto", "dist"], metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("bench/results/many_tensors.json"))
    parser.add_argument("--worker", metavar="RESULT", help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    if args.worker is not None:
        _work(Path(args.worker), args.counts[0], args.executors[0])
        return 0
    rows = []
    print(HEAD, flush=True)
    for executor in args.executors:
        for count in args.counts:
            rows.append(_measured(count, executor))
            print(line(rows[-1]), flush=True)
    write({**environment("many_tensors", words), "rows": rows}, args.out)
    return 0


HEAD = (
    f"{'executor':8}  {'tensors':>7}  {'first s':>8}  {'us/tensor':>9}  {'warm us':>8}  "
    f"{'out us':>8}  {'memory MiB':>10}"
)


def line(row: Row) -> str:
    """A line of the table: the figures of the slower rank."""
    first, warm, out, memory = (
        max(each[key] if key in ("first", "memory") else median(each[key]) for each in row["ranks"])
        for key in ("first", "warm", "out", "memory")
    )
    count = row["tensors"]
    return (
        f"{row['executor']:8}  {count:7}  {first:8.2f}  {first / count * 1e6:9.0f}  "
        f"{warm / count * 1e6:8.2f}  {out / count * 1e6:8.2f}  {memory / 2**20:10.0f}"
    )


def _measured(count: int, executor: str) -> Row:
    """The samples of both ranks, each in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results = [Path(folder, f"{rank}.json") for rank in range(2)]
        common = {
            **os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
        }  # fmt: skip
        launches = []
        for rank, result in enumerate(results):
            command = [sys.executable, "-m", "bench.many_tensors", "--worker", str(result)]
            command += ["--counts", str(count), "--executors", executor]
            launches.append(Launch(rank, 0, command, {**common, "RANK": str(rank)}))
        run_ranks(launches, timeout_secs=TIMEOUT.total_seconds())
        ranks = [json.loads(result.read_text()) for result in results]
    return {"tensors": count, "executor": executor, "ranks": ranks}


def _work(result: Path, count: int, executor: str) -> None:
    """Measure as one of the two ranks."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    rank = dist.get_rank()
    src, dst = (
        dict.fromkeys((f"experts.{i}.scale" for i in range(count)), rv.Layout(SHAPE, end))
        for end in ENDS
    )
    shape, out_shape = (rv.Layout(SHAPE, end).cell(rank).box.shape for end in ENDS)
    tensors = {name: torch.full(shape, float(i % 1000)) for i, name in enumerate(src)}

    def call(out: dict[str, Tensor] | None = None) -> Any:
        return rv.redistribute_many(tensors, src, dst, out=out, executor=executor)

    def outs() -> dict[str, Tensor]:
        flat = torch.empty(count, *out_shape)
        return dict(zip(dst, flat, strict=True))

    first = _secs(call)
    warm = [_secs(call) for _ in range(CALLS)]
    both = outs(), outs()
    for given in both:
        call(given)
    with_out = [_secs(call, [both[i % 2]]) for i in range(CALLS)]
    moved = call(both[0])
    assert all((moved[name] == i % 1000).all() for i, name in enumerate(dst))
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    result.write_text(json.dumps({"first": first, "warm": warm, "out": with_out, "memory": memory}))
    dist.barrier()
    dist.destroy_process_group()


def _secs(call: Callable[..., Any], arguments: Sequence[Any] = ()) -> float:
    """Processor seconds of this process in a call that begins on both ranks at once."""
    dist.barrier()
    start = time.process_time()
    call(*arguments)
    return time.process_time() - start


if __name__ == "__main__":
    sys.exit(main())
