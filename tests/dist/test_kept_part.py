"""A tensor that is the part of ``out`` which keeps its values: a gather in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm.run.request import kept_place
from tests.dist.shards import error_of, faults_of, shard_of
from tests.dist.world import Worlds
from tests.oracle import all_rvds

pytestmark = pytest.mark.dist

NUM_RANKS, SHAPE = 4, (8, 12)
EXECUTORS = ["dist", pytest.param("peer", marks=pytest.mark.native)]


def pairs() -> list[tuple[rv.Layout, rv.Layout]]:
    """Every pair in which some rank keeps what it has."""
    made = [rv.Layout(SHAPE, rvd) for rvd in all_rvds(NUM_RANKS, 2) if rvd.v == 1]
    return [
        (src, dst)
        for src in made
        for dst in made
        if any(kept_place(src, dst, rank) is not None for rank in range(NUM_RANKS))
    ]


def each_in_place(rank: int, executor: str) -> list[list[Any]]:
    group = dist.new_group(list(range(NUM_RANKS)))
    results = []
    for seed, (src, dst) in enumerate(pairs()):
        shard = shard_of(rank, src, seed)
        assert shard is not None
        out = torch.full(dst.cell(rank).box.shape, -1.0, dtype=shard.dtype)
        place = kept_place(src, dst, rank)
        given = shard
        if place is not None:
            given = out[tuple(slice(a, a + n) for a, n in zip(place, shard.shape, strict=True))]
            given.copy_(shard)
        results.append([])
        call = rv.Redistributor(rv.plan(src, dst), group, executor=executor)
        for again in (call, rv.redistribute, call):
            more = (src, dst) if again is rv.redistribute else ()
            options = {"group": group, "executor": executor} if more else {}
            found = again(given, *more, out=out, **options)
            assert found is out
            assert torch.equal(given, shard), "a source was modified"
            results[-1].append(found.numpy().copy())
    return results


@pytest.mark.parametrize("executor", EXECUTORS)
def test_what_a_shard_keeps_may_lie_in_out(worlds: Worlds, executor: str) -> None:
    ranks = worlds(NUM_RANKS).run(each_in_place, executor)
    assert len(pairs()) >= 15
    for seed, (src, dst) in enumerate(pairs()):
        for again in range(3):
            found = [results[seed][again] for results in ranks]
            assert faults_of(found, src, dst, seed=seed) == [], (src, dst)


GATHER = rv.Layout((8,), "R(1)V(1)D(4)"), rv.Layout((8,), "R(4)V(1)D(1)")
SUM = rv.Layout((8,), "R(1)V(4)D(1)"), rv.Layout((8,), "R(4)V(1)D(1)")


def misplaced(rank: int, src: rv.Layout, dst: rv.Layout, start: int, bad: int) -> list[str]:
    """The errors of two calls in which one rank passes another part of ``out``."""
    group = dist.new_group(list(range(NUM_RANKS)))
    size = src.cell(rank).box.shape[0]
    out = torch.zeros(8)
    first = start if rank == bad else (2 * rank) % (9 - size)
    tensor = out[first : first + size] if rank == bad else torch.zeros(size)

    def call() -> Any:
        return rv.redistribute(tensor, src, dst, out=out, group=group)

    return [error_of(call), error_of(call)]


@pytest.mark.parametrize(
    "src, dst, start", [(*GATHER, 0), (*GATHER, 5), (*SUM, 0)], ids=["other", "askew", "sum"]
)
def test_another_part_of_out_is_refused_on_every_rank(
    worlds: Worlds, src: rv.Layout, dst: rv.Layout, start: int
) -> None:
    for errors in worlds(NUM_RANKS).run(misplaced, src, dst, start, 2):
        assert all("rank 2: out shares memory with the tensor" in error for error in errors)
