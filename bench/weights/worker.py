"""One rank of the weight-sync benchmark; started by ``command.py``.

    python -m bench.weights.worker CONFIG.json RESULTS.jsonl

Rank 0 appends one JSON line per direction: samples of every method in seconds (the slowest rank of
each repetition), bytes, and the peak memory of every rank in a call of ``redistribute_many``.
"""

from __future__ import annotations

import ctypes
import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from bench.weights.models import sides

TIMEOUT = timedelta(seconds=300)
DTYPE = torch.bfloat16

Layouts = Mapping[str, rv.Layout]
Tensors = dict[str, Tensor]
Method = Callable[[Tensors, Tensors], None]


def main(argv: list[str]) -> None:
    """Measure both directions."""
    config = json.loads(Path(argv[0]).read_text())
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    trainers = range(config["trainers"])
    readers = range(len(trainers), len(trainers) + config["readers"])
    stages, tp = config["stages"], config["readers_tp"]
    trainer, reader = sides(config["model"], config["divisor"], trainers, readers, stages, tp)
    for direction, src, dst in (("there", trainer, reader), ("back", reader, trainer)):
        row = {"direction": direction, **_run(config, src, dst)}
        if dist.get_rank() == 0:
            with Path(argv[1]).open("a") as file:
                file.write(json.dumps(row) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def _run(config: dict[str, Any], src: Layouts, dst: Layouts) -> dict[str, Any]:
    rank = dist.get_rank()
    topology = rv.Topology.load(config["topology"])
    shards = {n: _shard(n, layout, rank) for n, layout in src.items() if rank in layout}
    outs = {
        n: torch.empty(layout.cell(rank).box.shape, dtype=DTYPE)
        for n, layout in dst.items()
        if rank in layout
    }
    both = [_shard_bytes(src, r) + _shard_bytes(dst, r) for r in range(dist.get_world_size())]
    limit = config["memory_limit"] + max(both)
    options: dict[str, Any] = {"topology": topology, "executor": config["executor"]}
    peak = _peak(
        lambda: rv.redistribute_many(shards, src, dst, memory_limit=limit, **options),
        _shard_bytes(src, rank),
    )

    def many(shards: Tensors, outs: Tensors) -> None:
        rv.redistribute_many(shards, src, dst, out=outs, memory_limit=limit, **options)

    def each(shards: Tensors, outs: Tensors) -> None:
        for name in src:
            if rank in src[name] or rank in dst[name]:
                given, out = shards.get(name), outs.get(name)
                rv.redistribute(given, src[name], dst[name], out=out, dtype=DTYPE, **options)

    found: dict[str, Method] = {"many": many, "each": each, "gather": _gather(src, dst)}
    ways = {name: found[name] for name in config["methods"]}
    samples: dict[str, list[float]] = {name: [] for name in ways}
    first: dict[str, float] = {}
    for repetition in range(config["repetitions"] + 1):
        for name, way in ways.items():
            for out in outs.values():
                out.fill_(torch.nan)
            secs = _timed(lambda way=way: way(shards, outs))  # type: ignore[misc]
            if repetition:
                samples[name].append(secs)
            else:
                first[name] = secs
            wrong = [n for n, out in outs.items() if not torch.equal(out, _shard(n, dst[n], rank))]
            if wrong:
                raise SystemExit(f"{name}: rank {rank} has wrong results: {wrong[:3]}")
    bundle = rv.plan_many(src, dst, "bfloat16", memory_limit=limit, **options)
    sizes = [_shard_bytes(side, r) for side in (src, dst) for r in range(dist.get_world_size())]
    return {
        "samples": samples,
        "first_secs": first,
        "predicted_secs": bundle.cost.secs,
        "host_bytes": bundle.busiest_bytes[-1],
        "model_bytes": sum(prod(layout.shape) for layout in src.values()) * DTYPE.itemsize,
        "largest_shards_bytes": max(sizes),
        "peak_bytes": peak,
    }


def _shard_bytes(side: Layouts, rank: int) -> int:
    mine = [x.cell(rank).box.num_elements for x in side.values() if rank in x]
    return sum(mine) * DTYPE.itemsize


def _shard(name: str, layout: rv.Layout, rank: int) -> Tensor:
    """A rank's shard of a tensor whose values depend only on its name and on the position."""
    count = prod(layout.shape)
    start = sum(name.encode()) % 97
    whole = torch.arange(start, start + count, dtype=torch.int32).remainder_(251).to(DTYPE)
    box = layout.cell(rank).box
    slices = tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))
    return whole.view(layout.shape)[slices].contiguous()


def _timed(call: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    call()
    secs = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
    dist.all_reduce(secs, op=dist.ReduceOp.MAX)
    return float(secs.item())


# --- the baseline -------------------------------------------------------------------------------


def _gather(src: Layouts, dst: Layouts) -> Method:
    """Gather every tensor, broadcast it from the first rank, and slice the shard of each reader."""
    rank = dist.get_rank()
    src_ranks = sorted({r for layout in src.values() for r in layout.ranks})
    dst_ranks = sorted({r for layout in dst.values() for r in layout.ranks})
    holders = dist.new_group(src_ranks)
    all_ranks = dist.new_group([src_ranks[0], *dst_ranks])

    def method(shards: Tensors, outs: Tensors) -> None:
        for name, layout in src.items():
            whole = None
            if rank in layout:
                whole = _gathered(shards[name], layout, holders)
            if rank in dst_ranks:
                whole = torch.empty(layout.shape, dtype=DTYPE)
            if rank == src_ranks[0] or rank in dst_ranks:
                assert whole is not None
                dist.broadcast(whole, src_ranks[0], group=all_ranks)
            if rank in dst_ranks:
                assert whole is not None
                box = dst[name].cell(rank).box
                slices = tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))
                outs[name].copy_(whole[slices])

    return method


def _gathered(shard: Tensor, layout: rv.Layout, group: Any) -> Tensor:
    cut = [d for d, count in enumerate(layout.rvd.d) if count > 1]
    if not cut:
        return shard
    tp = layout.rvd.d[cut[0]]
    parts = [torch.empty_like(shard) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, shard, group=group)
    return torch.cat(parts[:tp], cut[0])


# --- memory -------------------------------------------------------------------------------------


def _peak(call: Callable[[], object], given_bytes: int) -> list[int]:
    """The peak memory of every rank in a second call, which allocates its results.

    The peak is the sum of the given tensors, the memory that the call added to the process, and
    this rank's share of the shared staging memory. Memory that the first call left in pools is
    freed before.
    """
    call()
    rv.empty_cache()
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    before = _bytes("status", "VmRSS") - _bytes("status", "RssShmem")
    kept = call()
    added = _bytes("status", "VmHWM") - _bytes("status", "RssShmem") - before
    peak = given_bytes + max(0, added) + _bytes("smaps_rollup", "Pss_Shmem")
    del kept
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, peak)
    return found


def _bytes(file: str, field: str) -> int:
    lines = Path("/proc/self", file).read_text().splitlines()
    (line,) = (line for line in lines if line.startswith(f"{field}:"))
    return int(line.split()[1]) << 10


if __name__ == "__main__":
    main(sys.argv[1:])
