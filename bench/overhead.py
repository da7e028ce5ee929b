"""Host overhead of a call: the time that rvdcomm adds to the copy or collective that it runs."""

from __future__ import annotations

import argparse
import json
import os
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
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
Measure the host overhead of one call of a compiled transition (rv.Redistributor), in microseconds.

  copy  a world of one rank: a tensor of 1 KiB to where it is, against plain out.copy_(x)
  dist  two ranks, messages: D->R, V->R and D->D', against the bare collective of the same bytes on
        a gloo process group of the same kind, with contiguous buffers that are allocated before
  peer  the same, where the ranks read each other's memory

Bare is the best of what gloo has for the case: its own all_gather, all_reduce or all_to_all, or
receives and sends of the two ranks to each other (and the sum, where there is one). All ways
alternate within one run; a sample is the mean of 20 calls in a row on rank 0, after a barrier.
Figures are medians. What a call adds has a target: 15 us to a copy, 30 us to a collective.
"""

EPILOG = """\
examples:
  python -m bench.overhead                         # all of it, about half a minute
  python -m bench.overhead --only copy             # no processes
  python -m bench.overhead --samples 1000 --out bench/results/overhead.json
"""

TIMEOUT = timedelta(seconds=60)
COPY_TARGET_SECS = 15e-6
COLLECTIVE_TARGET_SECS = 30e-6
WARM_UP = 5
CALLS_A_SAMPLE = 20
NUM_COLUMNS = 16

SIZES = {"1 KiB": 1 << 10, "64 KiB": 64 << 10}
"""Sizes of the whole tensor, in bytes."""

CASES = {
    "D->R": ("R(1)V(1)D(2,1)", "R(2)V(1)D(1,1)"),
    "V->R": ("R(1)V(2)D(1,1)", "R(2)V(1)D(1,1)"),
    "D->D'": ("R(1)V(1)D(2,1)", "R(1)V(1)D(1,2)"),
}

Way = Callable[[], Any]
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measure, print a table, and write a JSON file."""
    parser = parser_for("overhead", DESCRIPTION, EPILOG)
    parser.add_argument("--samples", type=int, default=200, help="of every way (default 200)")
    parser.add_argument("--only", choices=["copy", "dist", "peer"], help="leave out the others")
    parser.add_argument("--out", type=Path, default=Path("bench/results/overhead.json"))
    parser.add_argument("--worker", metavar="RESULTS", help=argparse.SUPPRESS)
    words = sys.argv[1:] if argv is None else argv
    args = parser.parse_args(words)
    torch.set_num_threads(1)
    if args.worker is not None:
        _work(Path(args.worker), args.samples, args.only)
        return 0
    rows = [] if args.only in ("dist", "peer") else _copies(args.samples)
    if args.only != "copy":
        rows += _start_ranks(args.samples, args.only)
    print(table(rows))
    write({**environment("overhead", words), "rows": rows}, args.out)
    return 0


def table(rows: list[Row]) -> str:
    """A line per row: the bare time, our time, their difference, and its target."""
    lines = [
        f"{'case':6}  {'size':>6}  {'way':14}  {'bare':12}  {'bare us':>8}  {'ours us':>8}  "
        f"{'added us':>8}  {'target':>8}"
    ]
    for row in rows:
        ours, bare = (median(row["samples"][name]) for name in (row["way"], row["bare"]))
        added = ours - bare
        met = "yes" if added <= row["target_secs"] else "NO"
        lines.append(
            f"{row['case']:6}  {row['size']:>6}  {row['way']:14}  {row['bare']:12}  "
            f"{bare * 1e6:8.1f}  {ours * 1e6:8.1f}  {added * 1e6:8.1f}  "
            f"{row['target_secs'] * 1e6:4.0f} {met:>3}"
        )
    return "\n".join(lines)


def _alternate(ways: dict[str, Way], num_samples: int, barrier: Way) -> dict[str, list[float]]:
    """Seconds per call of all ways, which alternate so that other load affects all of them."""
    samples: dict[str, list[float]] = {name: [] for name in ways}
    for repetition in range(-WARM_UP, num_samples):
        for name, way in ways.items():
            barrier()
            start = time.perf_counter()
            for _ in range(CALLS_A_SAMPLE):
                way()
            secs = (time.perf_counter() - start) / CALLS_A_SAMPLE
            if repetition >= 0:
                samples[name].append(secs)
    return samples


# --- a world of one -----------------------------------------------------------------------------


def _copies(num_samples: int) -> list[Row]:
    """Rows of a world of one rank, where the transition is only a copy."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=TIMEOUT)
    layout = rv.Layout((16, 16), "R(1)V(1)D(1,1)")
    call = rv.Redistributor(rv.plan(layout, layout, "float32"))
    tensor, out = torch.rand(16, 16), torch.empty(16, 16)
    ways: dict[str, Way] = {
        "out.copy_(x)": lambda: out.copy_(tensor),
        "call(x, out=)": lambda: call(tensor, out=out),
        "call(x)": lambda: call(tensor),
    }
    samples = _alternate(ways, num_samples, lambda: None)
    dist.destroy_process_group()
    return [
        {
            "case": "copy", "size": "1 KiB", "way": way, "bare": "out.copy_(x)",
            "target_secs": COPY_TARGET_SECS, "samples": samples,
        }
        for way in ("call(x, out=)", "call(x)")
    ]  # fmt: skip


# --- two ranks ----------------------------------------------------------------------------------


def _start_ranks(num_samples: int, only: str | None) -> list[Row]:
    """Rows of the cases with two ranks, each in a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "rows.json")
        command = [sys.executable, "-m", "bench.overhead", "--worker", str(results)]
        command += ["--samples", str(num_samples), *(["--only", only] if only else [])]
        common = {**os.environ, "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        launches = [
            Launch(rank, 0, command, {**common, **address, "RANK": str(rank)}) for rank in range(2)
        ]
        run_ranks(launches, timeout_secs=120 + 0.2 * num_samples)
        found: list[Row] = json.loads(results.read_text())
        return found


def _work(results: Path, num_samples: int, only: str | None) -> None:
    """Measure as one of the two ranks."""
    dist.init_process_group("gloo", timeout=TIMEOUT)
    # A group of its own for the bare collectives, because the barriers use the default group: a
    # group whose threads have just been at work is faster.
    group = dist.new_group([0, 1], timeout=TIMEOUT)
    executors = [only] if only else ["dist", "peer"]
    rows = []
    for size in SIZES:
        for case in CASES:
            rows += _measure(case, size, num_samples, executors, group)
    if dist.get_rank() == 0:
        results.write_text(json.dumps(rows))
    dist.barrier()
    dist.destroy_process_group()


def _measure(case: str, size: str, num_samples: int, executors: list[str], group: Any) -> list[Row]:
    rank = dist.get_rank()
    shape = (SIZES[size] // 4 // NUM_COLUMNS, NUM_COLUMNS)
    src, dst = (rv.Layout(shape, text) for text in CASES[case])
    tensor = torch.rand(src.cell(rank).box.shape)
    out = torch.empty(dst.cell(rank).box.shape)
    bare = _BARE[case](tensor, out, group)
    ways: dict[str, Way] = dict(bare)
    for executor in executors:
        call = rv.Redistributor(rv.plan(src, dst, "float32"), executor=executor)
        ways[executor] = partial(call, tensor, out=out)
    samples = _alternate(ways, num_samples, dist.barrier)
    best = min(bare, key=lambda name: median(samples[name]))
    return [
        {
            "case": case, "size": size, "way": executor, "bare": best,
            "target_secs": COLLECTIVE_TARGET_SECS, "samples": samples,
        }
        for executor in executors
    ]  # fmt: skip


# --- the bare collectives -----------------------------------------------------------------------
# Each of them leaves the data that a rank needs in preallocated contiguous memory. For D->D', the
# pack before and the unpack after the collective are not included.


def _offload(theirs: Tensor, mine: Tensor, group: Any) -> None:
    peer = 1 - dist.get_rank()
    works = [dist.irecv(theirs, peer, group), dist.isend(mine, peer, group)]
    for work in works:
        assert work is not None
        work.wait()


def _gathers(tensor: Tensor, out: Tensor, group: Any) -> dict[str, Way]:
    rank, halves = dist.get_rank(), out.chunk(2)
    # all_gather_single is the newer name of the function.
    all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)

    def messages() -> None:
        _offload(halves[1 - rank], tensor, group)
        halves[rank].copy_(tensor)

    return {"all_gather": partial(all_gather, out, tensor, group=group), "isend, irecv": messages}


def _sums(tensor: Tensor, out: Tensor, group: Any) -> dict[str, Way]:
    room = torch.zeros_like(tensor)

    def messages() -> None:
        _offload(room, tensor, group)
        torch.add(tensor, room, out=out)

    zeros = torch.zeros_like(tensor)
    return {"all_reduce": partial(dist.all_reduce, zeros, group=group), "isend, irecv": messages}


def _exchanges(tensor: Tensor, out: Tensor, group: Any) -> dict[str, Way]:
    rank, sent, received = dist.get_rank(), tensor.reshape(-1), torch.empty(out.numel())
    theirs, mine = received.chunk(2)[1 - rank], sent.chunk(2)[1 - rank]
    return {
        "all_to_all": partial(dist.all_to_all_single, received, sent, group=group),
        "isend, irecv": partial(_offload, theirs, mine, group),
    }


_BARE: dict[str, Callable[[Tensor, Tensor, Any], dict[str, Way]]] = {
    "D->R": _gathers,
    "V->R": _sums,
    "D->D'": _exchanges,
}


if __name__ == "__main__":
    sys.exit(main())
