"""Sources in the pool are read in place: same results, and no reads after a call returned."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm import native
from rvdcomm.run.in_place import InPlace
from rvdcomm.run.pool import pool_here
from rvdcomm.run.shared_memory.staging import SharedStaging
from tests.dist.shards import faults_of, pool_of_all_sizes, pooled, shard_of
from tests.dist.world import Worlds
from tests.oracle import all_rvds

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(native.core is None, reason="the extension is not built, or not wanted"),
]

NUM_RANKS = 4
SHAPE = (24, 40)
LARGE = (1024, 2048)
"""Large enough to be moved in several slices."""


def _pairs() -> list[tuple[rv.Layout, rv.Layout]]:
    made = [rv.Layout(SHAPE, rvd) for rvd in all_rvds(NUM_RANKS, 2)]
    return [(src, dst) for src in made for dst in made]


def each_in_place(rank: int, num: int) -> list[list[Any]]:
    """Every pair, with sources in the pool on all ranks, on none, and on some."""
    group = dist.new_group(list(range(NUM_RANKS)))
    results = []
    with pool_of_all_sizes():
        for seed, (src, dst) in enumerate(_pairs()[num::2]):
            call = rv.Redistributor(rv.plan(src, dst), group, executor="peer")
            results.append([])
            for ranks in _masks(seed):
                shard = shard_of(rank, src, seed)
                assert shard is not None
                given = pooled(shard) if rank in ranks else shard
                results[-1].append(call(given).numpy().copy())
                assert torch.equal(given, shard), "a source was modified"
                given.fill_(-1.0)
    return results


def _masks(seed: int) -> Iterator[list[int]]:
    everybody = list(range(NUM_RANKS))
    yield from (everybody, [])
    for i in range(2):
        draw = random.Random(f"{seed}/{i}")
        yield draw.sample(everybody, draw.randrange(1, NUM_RANKS))


@pytest.mark.parametrize("num", [0, 1])
def test_all_pairs_move_correctly_with_sources_in_the_pool_or_elsewhere(
    worlds: Worlds, num: int
) -> None:
    found = worlds(NUM_RANKS).run(each_in_place, num, timeout_secs=120.0)
    for seed, (src, dst) in enumerate(_pairs()[num::2]):
        for mask in range(len(found[0][seed])):
            of_ranks = [found[rank][seed][mask] for rank in range(NUM_RANKS)]
            assert faults_of(of_ranks, src, dst, seed) == [], (src.rvd, dst.rvd, mask)


def reuse_at_once(rank: int, src: rv.Layout, dst: rv.Layout, slow: int) -> list[Any]:
    """The owner writes to its source as soon as the call returns; one rank comes late."""
    call = rv.Redistributor(rv.plan(src, dst), executor="peer")
    shard = shard_of(rank, src)
    assert shard is not None
    source = pooled(shard)
    results = []
    for seed in range(4):
        source.copy_(shard_of(rank, src, seed))
        if rank == slow:
            time.sleep(0.05)
        results.append(call(source).numpy().copy())
        source.fill_(-1.0)
    return results


@pytest.mark.parametrize(
    ("src", "dst", "slow"),
    [
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", 0),
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", 3),
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", 3),
        ("R(1)V(2)D(2,1)", "R(4)V(1)D(1,1)", 0),
    ],
)
def test_no_rank_reads_a_source_after_the_call_of_its_owner_returned(
    worlds: Worlds, src: str, dst: str, slow: int
) -> None:
    layouts = rv.Layout(LARGE, src), rv.Layout(LARGE, dst)
    found = worlds(NUM_RANKS).run(reuse_at_once, *layouts, slow)
    for seed in range(4):
        assert faults_of([results[seed] for results in found], *layouts, seed) == []


def staged_bytes(rank: int) -> tuple[list[int], bool]:
    """Staging bytes written with a source elsewhere, and with a source in the pool."""
    src, dst = rv.Layout(LARGE, "R(1)V(1)D(4,1)"), rv.Layout(LARGE, "R(1)V(1)D(1,4)")
    call = rv.Redistributor(rv.plan(src, dst), executor="peer")
    staging = call._program._staging
    assert isinstance(staging, SharedStaging)
    shard = shard_of(rank, src)
    assert shard is not None
    changed = []
    for source in (shard, pooled(shard)):
        staging.memory.own.fill_(0)
        dist.barrier()
        call(source)
        dist.barrier()
        changed.append(int(staging.memory.own.count_nonzero()))
    result = call(pooled(shard))
    found = pool_here()
    assert found is not None
    # What a call returns is read in place by the next.
    return changed, found.location(result.data_ptr(), result.nbytes) > 0


def test_source_in_the_pool_is_not_copied_to_staging(worlds: Worlds) -> None:
    for changed, is_in_pool in worlds(NUM_RANKS).run(staged_bytes):
        assert changed[0] > 0
        assert changed[1] == 0
        assert is_in_pool


def mapping_refused(rank: int, victim: int) -> tuple[bool, Any]:
    """One rank cannot map the pools of others, so all ranks copy their sources to staging."""
    import rvdcomm.run.shared_memory.domain as module

    mapping_of = module.mapping_of
    if rank == victim:
        module.mapping_of = lambda _: None
    try:
        group = dist.new_group(list(range(NUM_RANKS)))
        src, dst = rv.Layout(LARGE, "R(1)V(4)D(1,1)"), rv.Layout(LARGE, "R(1)V(1)D(4,1)")
        call = rv.Redistributor(rv.plan(src, dst), group, executor="peer")
        shard = shard_of(rank, src)
        assert shard is not None
        return call._program._in_place is None, call(pooled(shard)).numpy().copy()
    finally:
        module.mapping_of = mapping_of


def test_if_one_rank_cannot_map_a_pool_no_source_is_read_in_place(worlds: Worlds) -> None:
    found = worlds(NUM_RANKS).run(mapping_refused, 2)
    src, dst = rv.Layout(LARGE, "R(1)V(4)D(1,1)"), rv.Layout(LARGE, "R(1)V(1)D(4,1)")
    assert all(is_refused for is_refused, _ in found)
    assert faults_of([result for _, result in found], src, dst) == []


def test_all_ranks_find_the_same_copies_that_can_be_left_out() -> None:
    for text in ("R(1)V(4)D(1,1)", "R(1)V(2)D(2,1)", "R(1)V(1)D(4,1)"):
        src, dst = rv.Layout(LARGE, text), rv.Layout(LARGE, "R(1)V(1)D(1,4)")
        plan = rv.plan(src, dst)
        domain = range(NUM_RANKS)
        found = [InPlace.of(plan.program_of(rank), rank, domain) for rank in domain]
        assert len({each.copies for each in found}) == 1
        assert found[0].copies
        for rank in domain:
            readers = {other for other in domain if rank in found[other].owners}
            assert found[rank].readers == readers


def test_small_sources_are_staged() -> None:
    src, dst = rv.Layout(SHAPE, "R(1)V(1)D(4,1)"), rv.Layout(SHAPE, "R(1)V(1)D(1,4)")
    program = rv.plan(src, dst).program
    assert InPlace.of(program, 0, range(NUM_RANKS)).copies == frozenset()
    assert np.prod(SHAPE) * 4 < 1 << 20
