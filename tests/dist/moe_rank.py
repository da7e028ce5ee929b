"""Redistribute a mixture of experts to other ranks and back, as one rank of a process group.

``test_moe_cluster`` starts this command on every rank:

    python -m tests.dist.moe_rank TOPOLOGY.json

If a result is wrong, the process ends with a nonzero status and prints the names of wrong tensors.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from bench.weights.models import MoeModel

MODEL = MoeModel(5, 48, 20, 8, 2, 16, 64)
STAGING = 128 << 10
"""Staging memory in bytes, much less than the shards, so that there are many buckets."""

Layouts = Mapping[str, rv.Layout]


def shard(name: str, number: int, layout: rv.Layout, rank: int, call: int) -> Tensor:
    """A shard whose values differ by tensor, element and call."""
    whole = torch.arange(layout.shape[0] * layout.shape[1]).view(layout.shape) + 10_007 * number
    box = layout.cell(rank).box
    slices = tuple(slice(low, high) for low, high in zip(box.lo, box.hi, strict=True))
    return (whole[slices] * (call + 1)).to(torch.float64).contiguous()


def check(src: Layouts, dst: Layouts, topology: rv.Topology, limit: int) -> None:
    """Check that each of two calls gives every rank the right shards of that call."""
    rank = dist.get_rank()
    for call in range(2):
        given = {
            name: shard(name, i, layout, rank, call)
            for i, (name, layout) in enumerate(src.items())
            if rank in layout
        }
        found = rv.redistribute_many(given, src, dst, topology=topology, memory_limit=limit)
        wrong = [
            name
            for i, (name, layout) in enumerate(dst.items())
            if rank in layout and not torch.equal(found[name], shard(name, i, layout, rank, call))
        ]
        if wrong:
            raise SystemExit(f"rank {rank}, call {call}: {len(wrong)} are wrong: {wrong[:3]}")


def main(path: str) -> None:
    """Check the redistribution from the trainer to the server, and back."""
    dist.init_process_group("gloo")
    topology = rv.Topology.load(path)
    half = dist.get_world_size() // 2
    trainer = MODEL.trainer(range(half), num_stages=2)
    server = MODEL.server(range(half, 2 * half), tp=2)
    for src, dst in ((trainer, server), (server, trainer)):
        free = rv.plan_many(src, dst, "float64", topology=topology)
        limit = max(map(free.shard_bytes, free.ranks)) + STAGING
        bundle = rv.plan_many(src, dst, "float64", topology=topology, memory_limit=limit)
        assert sum(len(batch.buckets) for batch in bundle.batches) > 10
        check(src, dst, topology, limit)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
