"""Sums have a fixed order: two runs agree bit for bit, and so do all replicas of one result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from tests.covering import each_value
from tests.dist.world import Worlds

pytestmark = pytest.mark.dist

SHAPE = (24, 40)
# Backends cut large tensors into segments, and may sum each segment in another order.
LARGE_SHAPE = (210, 260)
SHUFFLED = {4: (2, 0, 3, 1), 8: (5, 2, 7, 0, 3, 6, 1, 4)}

TRANSITIONS = [
    ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
    ("R(1)V(4)D(1,1)", "R(2)V(1)D(2,1)"),
    ("R(2)V(2)D(1,1)", "R(4)V(1)D(1,1)"),
    ("R(2)V(4)D(1,1)", "R(8)V(1)D(1,1)"),
    ("R(1)V(8)D(1,1)", "R(8)V(1)D(1,1)"),
    ("R(1)V(8)D(1,1)", "R(4)V(2)D(1,1)"),
    ("R(2)V(2)D(1,2)", "R(4)V(1)D(2,1)"),
]
TOPOLOGIES = ("one host", "free rounds", "two hosts")


def topology_of(name: str, num_ranks: int) -> rv.Topology | None:
    """Topologies for which the planner sums in one step, by all_reduce, and host by host."""
    half = num_ranks // 2
    return {
        "one host": None,
        "free rounds": rv.Topology.single_host(num_ranks, 0.0, 1e9),
        "two hosts": rv.Topology.hosts(
            [range(half), range(half, num_ranks)], rv.Link(0.0, 8e9), rv.Link(0.0, 1e9)
        ),
    }[name]


def random_shard(rank: int, src: rv.Layout, dtype: str) -> Tensor:
    """Floats of widely different sizes, so that every order of addition rounds differently."""
    cell = src.cell(rank)
    # Replicas hold equal values. (Hashes of numbers are alike in all processes.)
    generator = torch.Generator().manual_seed(hash((cell.part, cell.box.lo)))
    values = torch.randn(cell.box.shape, generator=generator)
    scales = torch.randint(-6, 7, cell.box.shape, generator=generator)
    return (values * 2.0**scales).to(getattr(torch, dtype))


def sums(
    rank: int, src: rv.Layout, dst: rv.Layout, topology: rv.Topology | None, dtype: str
) -> tuple[rv.Cell, bytes]:
    """What this rank holds, and its bits; those of two results are equal."""
    tensor = random_shard(rank, src, dtype)
    results = [rv.redistribute(tensor, src, dst, topology=topology) for _ in range(2)]
    first, second = (result.view(torch.uint8).numpy().tobytes() for result in results)
    assert first == second
    return replace(dst.cell(rank), replica=0), first


@each_value(
    rvds=TRANSITIONS,
    topology=TOPOLOGIES,
    values=[
        ("ascending", "float32", SHAPE),
        ("shuffled", "bfloat16", SHAPE),
        ("ascending", "float32", LARGE_SHAPE),
    ],
)
def test_sums_are_equal_in_every_run_and_replica(
    worlds: Worlds, rvds: tuple[str, str], topology: str, values: tuple[str, str, tuple[int, int]]
) -> None:
    order, dtype, shape = values
    num_ranks = rv.RVD(rvds[0]).num_ranks
    ranks = SHUFFLED[num_ranks] if order == "shuffled" else range(num_ranks)
    src, dst = (rv.Layout(shape, rvd, ranks) for rvd in rvds)
    args = (src, dst, topology_of(topology, num_ranks), dtype)
    found = worlds(num_ranks).run(sums, *args)
    assert len(set(found)) == len({cell for cell, _ in found}), "replicas differ"


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_shards_give_different_sums_in_different_orders(dtype: str) -> None:
    src = rv.Layout(SHAPE, "R(1)V(4)D(1,1)")
    a, b, c, d = (random_shard(rank, src, dtype) for rank in range(4))
    sums = [a + b + c + d, a + c + b + d, d + c + b + a, (a + b) + (c + d)]
    assert len({total.view(torch.uint8).numpy().tobytes() for total in sums}) == 4
