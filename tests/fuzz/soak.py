"""Soak: call ``redistribute`` in a loop, and measure the resources that processes hold.

The resources are memory, file descriptors, threads, and files in shared memory. A group compiles a
transition that is new to it, and keeps the result (``run/world.py`` gives the reason). Resources
must therefore stay constant only in a loop over known transitions. ``--new`` measures the growth
with new transitions only.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass, fields
from itertools import cycle, product
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

import rvdcomm as rv
from tests.dist.world import ProcessWorld
from tests.fuzz.command import Report, parser

EXECUTORS = ("auto", "dist", "peer")
ROUND_SECS, MIN_CALLS = 0.25, 12
"""Seconds of calls, and least number of calls, between two looks (measurements of resources)."""

MIN_LOOKS = 8
"""Least number of looks; with fewer looks, medians of thirds are not meaningful."""

WARM_UP = 0.25
"""Share of the rounds, at the beginning, in which allocators and pools may still grow."""

SLACK = {"rss_bytes": 4 << 20, "fds": 0, "threads": 0, "shm_files": 0}
"""Allowed growth from the first to the last third of the looks.

For memory, it is the size of two results of 2 MB, because the pool may hold one or two free results
during a look. A leak of 800 bytes per call reaches this size after about 5,000 calls.
"""

TRANSITIONS = (
    ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
    ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)"),
    ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
    ("R(1)V(1)D(1,4)", "R(4)V(1)D(1,1)"),
    ("R(1)V(2)D(2,1)", "R(2)V(1)D(1,2)"),
    ("R(4)V(1)D(1,1)", "R(1)V(1)D(2,2)"),
)
SHAPES = ((54, 35), (256, 128), (801, 640))
"""Shapes of tensors of a few KB, 128 KiB and 2 MB; results of 2 MB come from a pool of blocks."""

NUM_RANKS = 4


@dataclass(frozen=True)
class Held:
    """The resources that a process holds."""

    rss_bytes: int
    fds: int
    threads: int
    shm_files: int

    @classmethod
    def now(cls) -> Held:
        gc.collect()
        # Freed memory that the allocator keeps is no leak, and its size varies at random.
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        shm = os.listdir("/dev/shm") if os.path.isdir("/dev/shm") else []
        return cls(
            rss_bytes=pages * os.sysconf("SC_PAGE_SIZE"),
            fds=len(os.listdir("/proc/self/fd")),
            threads=len(os.listdir("/proc/self/task")),
            shm_files=sum(name.startswith("rvdcomm") for name in shm),
        )


def main(words: Sequence[str] | None = None) -> int:
    made = parser(
        "soak",
        "Call redistribute in a loop on 4 processes, with every executor, changing transitions,\n"
        "shapes, strides, out= and async_op, and compare what the processes hold early and late.",
        "  python -m tests.fuzz.soak --secs 120\n"
        "  python -m tests.fuzz.soak --secs 30 --new     what one more transition keeps\n",
        has_seed=False,
    )
    made.add_argument("--secs", type=float, default=120.0, help="how long (default 120)")
    made.add_argument(
        "--new", action="store_true", help="only transitions that are new; prints the growth"
    )
    args = made.parse_args(words)
    world = ProcessWorld(NUM_RANKS, 60.0)
    try:
        return soak(world, args.secs, args.new).print()
    finally:
        world.stop()


def soak(world: ProcessWorld, secs: float, is_new: bool = False) -> Report:
    """Run the loop for ``secs`` seconds, and check the resources of every rank."""
    report = Report("soak of new transitions" if is_new else "soak")
    of_ranks = world.run(loop, secs, is_new, timeout_secs=secs + 120)
    for rank, (num_calls, held) in enumerate(of_ranks):
        report.counts["calls a rank"] = num_calls
        report.counts["looks"] = len(held)
        first, last = thirds(held)
        for name, slack in SLACK.items():
            a, b = first[name], last[name]
            for third, value in (("first", a), ("last", b)):
                what = f"{name}, median of the {third} third, of the rank that has most"
                report.counts[what] = max(report.counts[what], round(value))
            growth = f"{name}, growth of the rank that grows most"
            report.counts[growth] = max(report.counts[growth], round(b - a))
            if b > a + slack and not is_new:
                report.findings.append(f"rank {rank}: {name} grows from {a:g} to {b:g}")
    return report


def thirds(held: list[Held]) -> tuple[dict[str, float], dict[str, float]]:
    """Medians of the first and of the last third of the looks, after the warm-up."""
    warm = held[round(len(held) * WARM_UP) :]
    third = max(1, len(warm) // 3)
    names = [field.name for field in fields(Held)]
    first, last = (
        dict(zip(names, map(median, zip(*map(astuple, part), strict=True)), strict=True))
        for part in (warm[:third], warm[-third:])
    )
    return first, last


# --- on the ranks -------------------------------------------------------------------------------


def loop(rank: int, secs: float, is_new: bool) -> tuple[int, list[Held]]:
    """Make calls; returns the number of calls, and the looks. All ranks make the same calls."""
    calls = new_calls() if is_new else known_calls()
    held: list[Held] = []
    num_calls = 0
    num_a_round = MIN_CALLS
    if not is_new:
        # All transitions are compiled before the first look.
        for _ in range(len(EXECUTORS) * len(TRANSITIONS) * len(SHAPES) * NUM_WAYS):
            call(rank, *next(calls))
    deadline = time.monotonic() + secs
    while not is_over(deadline) or len(held) < MIN_LOOKS:
        start = time.monotonic()
        for _ in range(num_a_round):
            call(rank, *next(calls))
        num_calls += num_a_round
        secs_a_call = (time.monotonic() - start) / num_a_round
        held.append(Held.now())
        num_a_round = agreed(max(MIN_CALLS, round(ROUND_SECS / secs_a_call)))
    return num_calls, held


NUM_WAYS = 4

Call = tuple[str, tuple[int, ...], str, str, int]


def known_calls() -> Iterator[Call]:
    """All combinations of options, in an endless loop."""
    for executor, shape, (src, dst), way in cycle(
        product(EXECUTORS, SHAPES, TRANSITIONS, range(NUM_WAYS))
    ):
        yield executor, shape, src, dst, way


def new_calls() -> Iterator[Call]:
    """Calls that are all different, because each has another shape."""
    for i, (executor, _, src, dst, way) in enumerate(known_calls()):
        yield executor, (40 + i % 97, 40 + i // 97), src, dst, way


def call(rank: int, executor: str, shape: tuple[int, ...], src: str, dst: str, way: int) -> Any:
    """One call: plain, strided, with out=, or in the background."""
    layouts = rv.Layout(shape, src), rv.Layout(shape, dst)
    mine, theirs = (layout.cell(rank).box.shape for layout in layouts)
    tensor = torch.ones(mine[::-1]).t() if way == 1 else torch.ones(mine)
    out = torch.empty(theirs) if way == 2 else None
    made = rv.redistribute(tensor, *layouts, out=out, executor=executor, async_op=way == 3)
    return made.wait() if way == 3 else made


def is_over(deadline: float) -> bool:
    """Whether the deadline has passed on rank 0; all ranks get this answer, and stop together."""
    return bool(agreed(time.monotonic() > deadline))


def agreed(value: int) -> int:
    """The value of rank 0, which is broadcast to all ranks."""
    box = torch.tensor([int(value)])
    dist.broadcast(box, 0)
    return int(box)


if __name__ == "__main__":
    raise SystemExit(main())
