"""Faults: random failures of real processes during calls; a call must never return wrong data.

In every round, the ranks form a group and call known transitions with new data each time. At a
random call, one rank fails in a random way: it raises in the middle of the call, calls another
transition, is late by more than the timeout, misses the call, or is killed. The other ranks catch
their errors and continue. Every result of a call is compared with a dense oracle.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm.run import RankProgram
from tests.dist.shards import pool_of_all_sizes, shard_of
from tests.dist.world import ProcessWorld
from tests.fuzz.command import Report, parser, progress
from tests.oracle import parts_of

NUM_RANKS = 4
TIMEOUT_SECS = 2.0
WORLD_SECS = 60.0
NUM_CALLS = 5
EXECUTORS = ("peer", "dist")
KINDS = ("raise", "other", "late", "miss", "kill")
BATCH = 10
"""Rounds per world of processes; only the last round may kill a rank."""

SHAPE = (54, 36)
PAIRS = (
    ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
    ("R(1)V(1)D(4,1)", "R(4)V(1)D(1,1)"),
    ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
    ("R(1)V(1)D(1,4)", "R(1)V(1)D(4,1)"),
    ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)"),
)


@dataclass(frozen=True)
class Fault:
    """The fault of one round; equal on all ranks."""

    index: int
    executor: str
    kind: str
    victim: int
    at: int
    pairs: tuple[int, ...]
    other: int
    pooled: tuple[bool, ...]
    """For each rank, whether its source is in the pool, where other ranks read it in place."""

    @classmethod
    def draw(cls, seed: int, index: int, may_kill: bool) -> Fault:
        rng = random.Random(f"{seed}/{index}")
        kind = "kill" if may_kill else rng.choice(KINDS[:-1])
        pairs = [rng.randrange(len(PAIRS)) for _ in range(NUM_CALLS)]
        at = rng.randrange(NUM_CALLS - 1)
        other = rng.choice([i for i in range(len(PAIRS)) if i != pairs[at]])
        if kind == "miss":
            # The next call must differ from the missed one. Otherwise the other ranks take the next
            # call of the victim for the missed call.
            pairs[at + 1] = other
        executor = EXECUTORS[rng.random() < 0.25]
        victim = rng.randrange(NUM_RANKS)
        is_pooled = tuple(rng.random() < 0.6 for _ in range(NUM_RANKS))
        return cls(index, executor, kind, victim, at, tuple(pairs), other, is_pooled)


def main(words: Sequence[str] | None = None) -> int:
    made = parser(
        "faults",
        "Let a rank of a group of 4 processes fail at random, again and again, and compare\n"
        "whatever the calls of all ranks return with a dense oracle.",
        "  python -m tests.fuzz.faults --rounds 1000\n"
        "  python -m tests.fuzz.faults --seed 3 --first 20 --rounds 10     one batch again\n",
    )
    made.add_argument("--rounds", type=int, default=1000, help="how many (default 1000)")
    made.add_argument("--first", type=int, default=0, help="index of the first one (default 0)")
    args = made.parse_args(words)
    return fuzz(args.seed, range(args.first, args.first + args.rounds)).print()


def fuzz(seed: int, indices: range) -> Report:
    """Run the rounds of these indices."""
    report = Report("random faults on real processes")
    world = ProcessWorld(NUM_RANKS, WORLD_SECS)
    try:
        for first in progress(indices[::BATCH], "batch"):
            batch = range(first, min(first + BATCH, indices.stop))
            faults = [Fault.draw(seed, i, may_kill=i == batch[-1]) for i in batch]
            dying = [fault.victim for fault in faults if fault.kind == "kill"]
            try:
                of_ranks = world.run(run_rounds, faults, dying=dying, timeout_secs=120.0)
            except Exception as error:
                # The next batch gets a new world, because the state of this one is unknown.
                notes = " ".join(getattr(error, "__notes__", []))[-1500:]
                report.findings.append(f"rounds {batch}: {error!r}\n  {notes}")
                world = ProcessWorld(NUM_RANKS, WORLD_SECS)
                continue
            report.counts.update(f"{fault.kind}, {fault.executor}" for fault in faults)
            for rank, found in enumerate(of_ranks):
                for counts, findings in found or ():
                    report.counts.update(counts)
                    report.findings += [f"rank {rank}: {finding}" for finding in findings]
    finally:
        world.stop()
    return report


# --- on the ranks -------------------------------------------------------------------------------

Round = tuple[Counter[str], list[str]]


class InjectedError(Exception):
    """The error that a rank raises in the middle of a call."""


def run_rounds(rank: int, faults: Sequence[Fault]) -> list[Round]:
    with pool_of_all_sizes():
        return [run_round(rank, fault) for fault in faults]


def run_round(rank: int, fault: Fault) -> Round:
    """Run a round on this rank; returns counts of outcomes, and findings."""
    timeout = timedelta(seconds=TIMEOUT_SECS)
    group = dist.new_group(list(range(NUM_RANKS)), timeout=timeout)
    made = partial(call, rank, executor=fault.executor, group=group, pooled=fault.pooled[rank])
    for pair in range(len(PAIRS)):
        made(pair, seed=0)
    dist.barrier()
    counts: Counter[str] = Counter()
    findings = []
    for i, pair in enumerate(fault.pairs):
        is_victim = rank == fault.victim and i == fault.at
        if is_victim and fault.kind == "miss":
            continue
        wanted = fault.other if is_victim and fault.kind == "other" else pair
        seed = 1 + NUM_CALLS * fault.index + i
        made_call = partial(made, wanted, seed=seed)
        error, result = attempt(
            failing(made_call, fault.kind, bool(fault.index % 2)) if is_victim else made_call
        )
        counts[f"calls that {'return' if error is None else 'raise'}"] += 1
        if error is None and not np.array_equal(result, own_data(rank, wanted, seed)):
            findings.append(f"{fault}: call {i} returned other data")
        elif error is not None and not error.startswith(("CommError: ", "InjectedError: ")):
            findings.append(f"{fault}: call {i} raised {error}")
    if fault.kind == "kill":
        return counts, findings
    dist.barrier()
    error, _ = attempt(partial(made, fault.pairs[0], seed=0))
    # A victim that missed the second-last call may notice the failure only in this call.
    if error is None:
        findings.append(f"{fault}: the group is not failed on this rank")
    dist.barrier()
    dist.destroy_process_group(group)
    return counts, findings


def call(rank: int, pair: int, *, executor: str, seed: int, group: Any, pooled: bool) -> Any:
    src, dst = (rv.Layout(SHAPE, text) for text in PAIRS[pair])
    shard = shard_of(rank, src, seed)
    assert shard is not None
    if pooled:
        shard = rv.empty(shard.shape).copy_(shard)
    try:
        return rv.redistribute(shard, src, dst, group=group, executor=executor).numpy().copy()
    finally:
        # After the call, the user may overwrite the source.
        shard.fill_(-1.0)


def own_data(rank: int, pair: int, seed: int) -> Any:
    """The expected result of this rank, computed by the dense oracle."""
    src, dst = (rv.Layout(SHAPE, text) for text in PAIRS[pair])
    whole = np.sum(parts_of(src, "float32", seed), axis=0, dtype="float32")
    box = rv.Layout(SHAPE, "R(1)V(1)D(1,1)").cell(0).box
    return whole[dst.cell(rank).box.slices_within(box)]


def attempt(made: Callable[[], Any]) -> tuple[str | None, Any]:
    try:
        return None, made()
    except Exception as error:
        return f"{type(error).__name__}: {error}", None


def failing(made: Callable[[], Any], kind: str, is_after: bool) -> Callable[[], Any]:
    """The call ``made`` with a fault.

    The kinds "raise" and "kill" fail after all copies if ``is_after``, and before them otherwise.
    """

    def late() -> Any:
        time.sleep(2 * TIMEOUT_SECS)
        return made()

    def kill() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def broken(end: Callable[[], Any]) -> Any:
        """Make the call, but run ``end`` before or after all copies instead of ending normally."""
        run = RankProgram.run

        def run_and_end(self: RankProgram, shards: Any, device: Any) -> None:
            way = self._ways.get(device) or self._way(device)

            def broken_way(*arguments: Any) -> None:
                if is_after:
                    way(*arguments)
                end()

            self._ways[device] = broken_way
            try:
                run(self, shards, device)
            finally:
                self._ways[device] = way

        RankProgram.run = run_and_end  # type: ignore[method-assign]
        try:
            return made()
        finally:
            RankProgram.run = run  # type: ignore[method-assign]

    def inject() -> None:
        raise InjectedError("in the middle")

    chosen: dict[str, Callable[[], Any]] = {
        "late": late,
        "kill": partial(broken, kill),
        "raise": partial(broken, inject),
        "other": made,
    }
    return chosen[kind]


if __name__ == "__main__":
    raise SystemExit(main())
