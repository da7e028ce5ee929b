"""Processes: run random transitions on a world of real processes, with every executor."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm.layout import ITEM_BYTES
from rvdcomm.plans import clear_cache
from rvdcomm.run import World
from tests.dist.shards import pool_of_all_sizes, pooled
from tests.dist.world import ProcessWorld
from tests.fuzz.command import Report, parser, progress
from tests.fuzz.draw import Case, draw
from tests.fuzz.tensors import as_wide, out_of, tensor_of, whole_parts
from tests.oracle import Array, data_faults

EXECUTORS = ("auto", "dist", "peer")
BATCH = 25
"""Pairs per process group; the communicators are closed with the group."""

BATCH_SECS = 300.0
TIMEOUT_SECS = 60.0


def main(words: Sequence[str] | None = None) -> int:
    made = parser(
        "processes",
        "Redistribute random pairs of layouts on real processes, with every executor, strided\n"
        "shards, out= and later calls, and compare with a dense oracle.",
        "  python -m tests.fuzz.processes --pairs 1000 --ranks 8\n"
        "  python -m tests.fuzz.processes --seed 3 --first 17 --pairs 1     one pair again\n",
    )
    made.add_argument("--pairs", type=int, default=1000, help="how many (default 1000)")
    made.add_argument("--first", type=int, default=0, help="index of the first one (default 0)")
    made.add_argument("--ranks", type=int, default=8, help="processes (default 8)")
    args = made.parse_args(words)
    world = ProcessWorld(args.ranks, TIMEOUT_SECS)
    try:
        return fuzz(world, args.seed, range(args.first, args.first + args.pairs)).print()
    finally:
        world.stop()


def fuzz(world: ProcessWorld, seed: int, indices: range) -> Report:
    """Run the transitions of these indices."""
    report = Report(f"random pairs on {world.num_ranks} processes")
    for first in progress(indices[::BATCH], "batch"):
        batch = range(first, min(first + BATCH, indices.stop))
        try:
            found = world.run(run_batch, world.num_ranks, seed, batch, timeout_secs=BATCH_SECS)
        except Exception as error:  # the next batch gets a new world
            again = f"--first {batch.start} --pairs {len(batch)} --ranks {world.num_ranks}"
            notes = " ".join(getattr(error, "__notes__", []))[-1500:]
            report.findings.append(
                f"{type(error).__name__}: {error}\n  {notes}\n"
                f"  python -m tests.fuzz.processes --seed {seed} {again}"
            )
            continue
        for index, of_ranks in zip(batch, zip(*found, strict=True), strict=True):
            case = draw(seed, index, world.num_ranks, tuple(ITEM_BYTES))
            report.counts.update(_kinds(case))
            for fault in faults_of(case, of_ranks):
                again = f"--first {index} --pairs 1 --ranks {world.num_ranks}"
                report.findings.append(
                    f"{fault}\n  {case}\n  python -m tests.fuzz.processes --seed {seed} {again}"
                )
    return report


def _kinds(case: Case) -> Counter[str]:
    return Counter(["pairs", f"dtype {case.dtype}", f"of {len(case.src.shape)} dims"])


Results = dict[str, Any]
"""The result of every call of a rank: values from ``as_wide``, None, or the text of an error."""


def faults_of(case: Case, of_ranks: Sequence[Results | None]) -> list[str]:
    """The faults in the results of all ranks."""
    parts = whole_parts(case)
    faults = []
    members = {*case.src.ranks, *case.dst.ranks}
    for call in next(results for results in of_ranks if results):
        shards: dict[int, Array] = {}
        for rank in sorted(members):
            results = of_ranks[rank]
            assert results is not None
            got = results[call]
            if isinstance(got, str) or (got is None) != (rank not in case.dst):
                faults.append(f"{call}: rank {rank} has {got}")
            elif got is not None:
                shards[rank] = got
        if set(shards) == set(case.dst.ranks):
            faults += [f"{call}: {fault}" for fault in data_faults(case.dst, shards, parts)]
    return faults


# --- on the ranks -------------------------------------------------------------------------------


def run_batch(rank: int, num_ranks: int, seed: int, batch: range) -> list[Results | None]:
    """This rank's results of every pair."""
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    group = dist.new_group(list(range(num_ranks)))
    try:
        with pool_of_all_sizes():
            cases = [draw(seed, i, num_ranks, tuple(ITEM_BYTES)) for i in batch]
            return [run_pair(rank, case, group) for case in cases]
    finally:
        World.of(group).close()
        clear_cache()


def run_pair(rank: int, case: Case, group: Any) -> Results | None:
    """Results of a first and a later call with every executor; None outside both layouts."""
    if rank not in case.src and rank not in case.dst:
        return None
    rng = random.Random(f"{case.seed}/{case.index}/{rank}")
    parts = whole_parts(case)
    results: Results = {}
    for executor in EXECUTORS:
        for call in ("first call", "later call"):
            tensor, out = tensor_of(rank, case, parts, rng), out_of(rank, case, rng)
            before = None if tensor is None else as_wide(tensor).copy()
            if tensor is not None and rng.random() < 0.5:
                tensor = pooled(tensor)
            try:
                got = rv.redistribute(
                    tensor,
                    case.src,
                    case.dst,
                    topology=case.topology,
                    out=out,
                    group=group,
                    executor=executor,
                    dtype=getattr(torch, case.dtype),
                )
            except Exception as error:
                results[f"{executor}, {call}"] = f"{type(error).__name__}: {error}"
                continue
            fault = _fault(case, got, out, tensor, before)
            results[f"{executor}, {call}"] = fault or (None if got is None else as_wide(got))
    return results


def _fault(
    case: Case, got: Tensor | None, out: Tensor | None, tensor: Tensor | None, before: Array | None
) -> str | None:
    """A fault that only this rank can detect; None if there is none."""
    if out is not None and got is not out:
        return "a result that is not out"
    if got is not None and got.dtype != getattr(torch, case.dtype):
        return f"a result of dtype {got.dtype}"
    if tensor is not None and before is not None and not np.array_equal(as_wide(tensor), before):
        return "an input that was modified"
    return None


if __name__ == "__main__":
    raise SystemExit(main())
