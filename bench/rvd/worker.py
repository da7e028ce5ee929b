"""One rank of the benchmark: runs every case with all methods in turn; started by ``run.py``.

    python -m bench.rvd.worker CONFIG.json RESULTS.jsonl

Rank 0 appends one JSON line per case: samples of every method in seconds (the slowest rank of each
repetition), the plan, and its bytes.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import rvdcomm as rv
from bench.rvd import methods
from bench.rvd.by_hand import Way, by_hand
from bench.rvd.cases import IN_GROUP, Case
from bench.rvd.report import BY_HAND
from bench.rvd.row import row_of

# Programs repeat a transition many times. One sample is therefore a row of calls, after one call
# that is not timed. If there are more ranks than cores, ranks leave a barrier some milliseconds
# apart. The first call of a row would include this delay where ranks wait for each other, but not
# where each rank only copies.
MAX_CALLS, ROW_SECS = 50, 0.05
# Rows that are not counted. The first row is one call; its time determines the number of calls in
# the second row, and the second row determines the number for all later rows. Two are needed: a
# single call may be disturbed, and then all later rows would be too short.
NUM_TRIALS = 2
WITH_MESH = {"dtensor", BY_HAND}
"""Methods that need a mesh of the group."""
MODULUS = 1021
"""Values are integers below this number, so that sums of parts are exact in any order."""


@dataclass(frozen=True)
class Config:
    """The configuration that ``run.py`` writes for the ranks."""

    cases: list[Case]
    methods: list[str]
    topology: rv.Topology
    min_repetitions: int
    max_repetitions: int
    secs_a_case: float
    message_secs: float

    @classmethod
    def load(cls, path: str) -> Config:
        """Read the file that ``run.py`` wrote."""
        values = json.loads(Path(path).read_text())
        values["cases"] = [Case(**case) for case in values["cases"]]
        values["topology"] = rv.Topology.load(values["topology"])
        return cls(**values)


def main(argv: list[str]) -> None:
    """Run all cases."""
    config = Config.load(argv[0])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=config.message_secs))
    meshes: dict[tuple[int, ...], Any] = {}
    for case in config.cases:
        src, _ = case.layouts
        if case.relation == IN_GROUP and src.ranks not in meshes and WITH_MESH & {*config.methods}:
            meshes[src.ranks] = _mesh(src.ranks)
    for case in config.cases:
        row = _run_case(case, config, meshes)
        if dist.get_rank() == 0:
            with Path(argv[1]).open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _mesh(ranks: tuple[int, ...]) -> Any:
    if len(ranks) == dist.get_world_size():
        return init_device_mesh("cpu", (len(ranks),))
    return DeviceMesh("cpu", list(ranks))


def _run_case(case: Case, config: Config, meshes: dict[tuple[int, ...], Any]) -> dict[str, Any]:
    """Samples of all methods, alternating within each repetition."""
    src, dst = case.layouts
    rank = dist.get_rank()
    is_member = rank in src or rank in dst
    plan = rv.plan(src, dst, "float32", config.topology)
    shard = _shard(src, rank)
    found: dict[str, methods.Method | None] = {
        "ours": methods.ours(src, dst, config.topology),
        "pool": methods.pooled(shard, src, dst, config.topology),
        "peer": methods.compiled(src, dst, config.topology, "peer"),
        "dist": methods.compiled(src, dst, config.topology, "dist"),
        "memcpy": methods.memcpy(src, dst),
        "p2p": methods.point_to_point(src, dst),
    }
    # All ranks of the world time the same methods together; those outside the group call none.
    if src.ranks in meshes:
        mesh = meshes[src.ranks]
        found["dtensor"] = methods.dtensor(mesh, src, dst)
        group = mesh.get_group() if rank in src else dist.group.WORLD
        hand = by_hand(group, src, dst)
        found |= {f"{BY_HAND}: {name}": partial(_given, way) for name, way in hand.items()}
    ways = {
        name: way
        for name, way in found.items()
        if way is not None and name.partition(":")[0] in config.methods
    }
    num_calls = dict.fromkeys(ways, 1)
    samples: dict[str, list[float]] = {name: [] for name in ways}
    started = time.perf_counter()
    for repetition in range(1 - NUM_TRIALS, config.max_repetitions + 1):
        for name, way in ways.items():
            secs, result = _timed(way, shard, is_member, num_calls[name])
            if repetition > 0:
                samples[name].append(secs)
                continue
            num_calls[name] = max(1, min(MAX_CALLS, int(ROW_SECS / secs)))
            if result is not None:
                _check(result, dst, src.rvd.v, rank, f"{case.name}, {name}")
        enough = time.perf_counter() - started > config.secs_a_case
        if repetition >= config.min_repetitions and _all(enough):
            break
    return row_of(case, plan, samples)


def _given(way: Way, shard: Tensor | None) -> Tensor:
    assert shard is not None, "every rank of the group has a shard"
    return way(shard)


def _all(flag: bool) -> bool:
    """The flag of rank 0, on all ranks, so that all stop at the same repetition."""
    decision = torch.tensor([int(flag)])
    dist.broadcast(decision, 0)
    return bool(decision.item())


def _timed(
    way: methods.Method, shard: Tensor | None, is_member: bool, num_calls: int
) -> tuple[float, Any]:
    """Seconds per call of the slowest rank (equal on all ranks), and this rank's result."""
    dist.barrier()
    result = way(shard) if is_member else None
    start = time.perf_counter()
    for _ in range(num_calls if is_member else 0):
        result = way(shard)
    secs = torch.tensor([(time.perf_counter() - start) / num_calls], dtype=torch.float64)
    dist.all_reduce(secs, op=dist.ReduceOp.MAX)
    return float(secs.item()), result


def _values(layout: rv.Layout, part: int) -> Tensor:
    """The whole tensor of one value part."""
    count = layout.shape[0] * layout.shape[1]
    flat = torch.arange(count, dtype=torch.int64).add_(part * 7).remainder_(MODULUS)
    return flat.to(torch.float32).view(layout.shape)


def _shard(layout: rv.Layout, rank: int) -> Tensor | None:
    if rank not in layout:
        return None
    cell = layout.cell(rank)
    box = rv.Layout(layout.shape, "R(1)V(1)D(1,1)").cell(0).box
    return _values(layout, cell.part)[cell.box.slices_within(box)].contiguous()


def _check(result: Tensor, dst: rv.Layout, num_parts: int, rank: int, what: str) -> None:
    """Raise unless the result is the sum of all parts, exactly."""
    box = rv.Layout(dst.shape, "R(1)V(1)D(1,1)").cell(0).box
    want = torch.zeros(dst.cell(rank).box.shape)
    for part in range(num_parts):
        want += _values(dst, part)[dst.cell(rank).box.slices_within(box)]
    if not torch.equal(result, want):
        raise SystemExit(f"{what}: rank {rank} has a wrong result")


if __name__ == "__main__":
    main(sys.argv[1:])
