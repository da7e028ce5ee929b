"""``rvdcomm calibrate``: measure the links of this cluster into a file, and find slow hosts."""

from __future__ import annotations

import argparse
import os
import sys
from datetime import timedelta
from pathlib import Path as FilePath

from rvdcomm import CommError, Topology
from rvdcomm.cli.arguments import parse_secs, parse_size
from rvdcomm.cli.command import FAILED, OK, Command, UsageError
from rvdcomm.plans import EXECUTORS

BACKENDS = ("gloo", "nccl")


def _calibrate(args: argparse.Namespace) -> int:
    """Measure as the rank that a launcher started, or start processes here that measure."""
    is_launched = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    _check(args, is_launched)
    from rvdcomm.calibration import worlds  # It needs torch.

    timeout = timedelta(seconds=args.timeout)
    try:
        if is_launched:
            worlds.joined(args.backend, timeout, lambda: measure_and_write(args))
        else:
            num_ranks = args.ranks or max(2, os.cpu_count() or 2)
            worlds.spawned(num_ranks, timeout, args.limit, measure_and_write, args)
    except CommError as error:
        print(f"rvdcomm: error: {error}", file=sys.stderr)
        return FAILED
    return OK


def _check(args: argparse.Namespace, is_launched: bool) -> None:
    """Refuse bad requests before minutes are spent."""
    if is_launched and args.ranks is not None:
        raise UsageError("a launcher started this rank already; leave out --ranks.")
    if not is_launched and args.backend != "gloo":
        raise UsageError(f"{args.backend} ranks are started by a launcher, such as torchrun.")
    if args.ranks is not None and args.ranks < 2:
        raise UsageError(f"--ranks {args.ranks}: links are between ranks; start at least 2.")
    if os.environ.get("RANK", "0") != "0":
        return
    out = FilePath(args.out).resolve()
    if not out.parent.is_dir():
        raise UsageError(f"--out {args.out}: there is no folder {out.parent}.")
    if out.is_dir():
        raise UsageError(f"--out {args.out} is a folder; name a file in it.")


def measure_and_write(args: argparse.Namespace) -> None:
    """Measure, on every rank; rank 0 prints the table and writes the file."""
    import torch.distributed as dist
    from tqdm import tqdm

    from rvdcomm.calibration import Effort, calibrate, table

    is_first = dist.get_rank() == 0
    like = None if args.like is None else Topology.load(args.like)
    effort = Effort(secs=args.secs, max_bytes=args.max_bytes)
    # None lets tqdm show the bar only on a terminal.
    with tqdm(bar_format="{desc} [{elapsed}]", disable=None if is_first else True) as bar:
        links, fit = calibrate(
            executor=args.executor, like=like, effort=effort, progress=bar.set_description
        )
    if is_first:
        links.save(args.out, notes=fit.notes())
        print(table(fit), f"\nwrote {args.out}", flush=True)


def _add_calibrate(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--out", metavar="FILE", default="topology.json", help="(default: %(default)s)"
    )
    parser.add_argument(
        "--ranks", type=int, metavar="N", help="processes to start here (default: one a core)"
    )
    parser.add_argument(
        "--executor", choices=EXECUTORS, help="that transfers (default: RVDCOMM_EXECUTOR or auto)"
    )
    parser.add_argument("--backend", choices=BACKENDS, default="gloo", help="(default: gloo)")
    parser.add_argument(
        "--like", metavar="FILE", help="a topology JSON whose groups to measure, such as racks"
    )
    parser.add_argument(
        "--secs",
        type=parse_secs,
        default=0.3,
        help="for the transfers of one size (default: %(default)s)",
    )
    parser.add_argument(
        "--max-bytes",
        type=parse_size,
        default="64MiB",
        metavar="BYTES",
        help="largest tensor (default: %(default)s)",
    )
    parser.add_argument(
        "--timeout",
        type=parse_secs,
        default=60.0,
        metavar="SECS",
        help="longest wait for another rank (default: %(default)g)",
    )
    parser.add_argument(
        "--limit",
        type=parse_secs,
        default=600.0,
        metavar="SECS",
        help="for everything, if the command starts the processes (default: %(default)g)",
    )


COMMAND = Command(
    "measure the links between ranks and between hosts into a file, and find slow hosts",
    """\
The ranks find out which of them share a host. The command prints every transfer with its measured
and its fitted time, the links, and hosts that are slower or faster than most. 'rvdcomm plan
--topology' and Network.load read the file: a topology, or a network if hosts differ.

examples:
  Processes of this machine:
    rvdcomm calibrate --ranks 4 --out here.json
  A cluster: on every host, with its own --node-rank:
    torchrun --nnodes 2 --node-rank 0 --nproc-per-node 4 --master-addr host0 -m rvdcomm calibrate
""",
    _add_calibrate,
    _calibrate,
)
