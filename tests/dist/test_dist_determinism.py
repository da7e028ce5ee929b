"""Sums have a fixed order: two runs agree bit for bit, and so do all replicas of one result."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from tests.covering import each_value
from tests.dist.world import Worlds
from tests.oracle import Array

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


def sum_twice(
    rank: int, src: rv.Layout, dst: rv.Layout, topology: rv.Topology | None, dtype: str
) -> tuple[Array, Array]:
    """Bits of two results."""
    tensor = random_shard(rank, src, dtype)
    results = [rv.redistribute(tensor, src, dst, topology=topology) for _ in range(2)]
    bits = {"float32": torch.int32, "bfloat16": torch.int16}[dtype]
    first, second = (result.view(bits).numpy() for result in results)
    return first, second


def num_values_by_cell(dst: rv.Layout, results: list[tuple[Array, Array]]) -> dict[rv.Cell, int]:
    """How many different results the replicas of each cell have."""
    values: dict[rv.Cell, set[bytes]] = {}
    for rank, (result, _) in enumerate(results):
        cell = replace(dst.cell(rank), replica=0)
        values.setdefault(cell, set()).add(result.tobytes())
    return {cell: len(found) for cell, found in values.items()}


@each_value(
    rvds=TRANSITIONS,
    topology=TOPOLOGIES,
    values=[("ascending", "float32"), ("shuffled", "bfloat16")],
)
def test_sums_are_equal_in_every_run_and_replica(
    worlds: Worlds, rvds: tuple[str, str], topology: str, values: tuple[str, str]
) -> None:
    (src_rvd, dst_rvd), (order, dtype) = rvds, values
    num_ranks = rv.RVD(src_rvd).num_ranks
    ranks = SHUFFLED[num_ranks] if order == "shuffled" else range(num_ranks)
    src, dst = rv.Layout(SHAPE, src_rvd, ranks), rv.Layout(SHAPE, dst_rvd, ranks)
    args = (src, dst, topology_of(topology, num_ranks), dtype)
    results = worlds(num_ranks).run(sum_twice, *args)
    assert [r for r, (a, b) in enumerate(results) if a.tobytes() != b.tobytes()] == []
    assert set(num_values_by_cell(dst, results).values()) == {1}


@pytest.mark.parametrize(
    "src_rvd, dst_rvd, topology",
    [
        (*TRANSITIONS[0], "two hosts"),
        (*TRANSITIONS[2], "free rounds"),
        (*TRANSITIONS[3], "two hosts"),
        (*TRANSITIONS[5], "free rounds"),
    ],
)
def test_large_sums_are_equal_in_every_run_and_replica(
    worlds: Worlds, src_rvd: str, dst_rvd: str, topology: str
) -> None:
    src, dst = rv.Layout(LARGE_SHAPE, src_rvd), rv.Layout(LARGE_SHAPE, dst_rvd)
    num_ranks = src.rvd.num_ranks
    args = (src, dst, topology_of(topology, num_ranks), "float32")
    results = worlds(num_ranks).run(sum_twice, *args)
    assert [r for r, (a, b) in enumerate(results) if a.tobytes() != b.tobytes()] == []
    assert set(num_values_by_cell(dst, results).values()) == {1}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_random_shards_give_different_sums_in_different_orders(dtype: str) -> None:
    src = rv.Layout(SHAPE, "R(1)V(4)D(1,1)")
    a, b, c, d = (random_shard(rank, src, dtype) for rank in range(4))
    sums = [a + b + c + d, a + c + b + d, d + c + b + a, (a + b) + (c + d)]
    assert len({total.view(torch.uint8).numpy().tobytes() for total in sums}) == 4
