"""Sources in the pool are read in place: same results, and no reads after a call returned."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from rvdcomm import native
from rvdcomm.run.in_place import InPlace
from rvdcomm.run.pool import pool_here
from rvdcomm.run.shared_memory import domain
from rvdcomm.run.shared_memory.staging import SharedStaging
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import pool_of_all_sizes, pooled, shard_of
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


def _masks(seed: int) -> Iterator[list[int]]:
    """The ranks with their source in the pool: all, none, some."""
    everybody = list(range(NUM_RANKS))
    draw = random.Random(f"{seed}/0")
    yield from (everybody, [], draw.sample(everybody, draw.randrange(1, NUM_RANKS)))


@pytest.mark.parametrize("num", [0, 1, 2])
@on_ranks(NUM_RANKS)
def test_all_pairs_move_correctly_with_sources_in_the_pool_or_elsewhere(
    rank: int, num: int
) -> None:
    group = dist.new_group(list(range(NUM_RANKS)))
    with pool_of_all_sizes():
        for seed, (src, dst) in enumerate(_pairs()[num::3]):
            call = rv.Redistributor(rv.plan(src, dst), group, executor="peer")
            for ranks in _masks(seed):
                shard = shard_of(rank, src, seed)
                given = pooled(shard) if rank in ranks else shard.clone()
                moved = call(given)
                assert torch.equal(given, shard), "a source was modified"
                given.fill_(-1.0)
                assert_moved(moved, src, dst, seed)


@pytest.mark.parametrize(
    "src_rvd, dst_rvd, slow",
    [
        ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", 0),
        ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)", 3),
        ("R(1)V(2)D(2,1)", "R(4)V(1)D(1,1)", 0),
    ],
)
@on_ranks(NUM_RANKS)
def test_no_rank_reads_a_source_after_the_call_of_its_owner_returned(
    rank: int, src_rvd: str, dst_rvd: str, slow: int
) -> None:
    """The owner writes to its source as soon as the call returns; one rank comes late."""
    src, dst = rv.Layout(LARGE, src_rvd), rv.Layout(LARGE, dst_rvd)
    call = rv.Redistributor(rv.plan(src, dst), executor="peer")
    source = pooled(shard_of(rank, src))
    results = []
    for seed in range(3):
        source.copy_(shard_of(rank, src, seed))
        if rank == slow:
            time.sleep(0.05)
        results.append(call(source).clone())
        source.fill_(-1.0)
    for seed, result in enumerate(results):
        assert_moved(result, src, dst, seed)


@on_ranks(NUM_RANKS)
def test_source_in_the_pool_is_not_copied_to_staging(rank: int) -> None:
    src, dst = rv.Layout(LARGE, "R(1)V(1)D(4,1)"), rv.Layout(LARGE, "R(1)V(1)D(1,4)")
    call = rv.Redistributor(rv.plan(src, dst), executor="peer")
    staging = call._program._staging
    assert isinstance(staging, SharedStaging)
    shard = shard_of(rank, src)
    for source, is_staged in ((shard, True), (pooled(shard), False)):
        staging.memory.own.fill_(0)
        dist.barrier()
        call(source)
        dist.barrier()
        assert (staging.memory.own.count_nonzero() > 0) == is_staged
    result = call(pooled(shard))
    # What a call returns is read in place by the next.
    assert pool_here().location(result.data_ptr(), result.nbytes) > 0


@on_ranks(NUM_RANKS)
def test_if_one_rank_cannot_map_a_pool_no_source_is_read_in_place(rank: int) -> None:
    """All ranks then copy their sources to staging."""
    src, dst = rv.Layout(LARGE, "R(1)V(4)D(1,1)"), rv.Layout(LARGE, "R(1)V(1)D(4,1)")
    with pytest.MonkeyPatch.context() as patch:
        if rank == 2:
            patch.setattr(domain, "mapping_of", lambda _: None)
        group = dist.new_group(list(range(NUM_RANKS)))
        call = rv.Redistributor(rv.plan(src, dst), group, executor="peer")
        assert call._program._in_place is None
        assert_moved(call(pooled(shard_of(rank, src))), src, dst)


def test_all_ranks_find_the_same_copies_that_can_be_left_out() -> None:
    for text in ("R(1)V(4)D(1,1)", "R(1)V(2)D(2,1)", "R(1)V(1)D(4,1)"):
        src, dst = rv.Layout(LARGE, text), rv.Layout(LARGE, "R(1)V(1)D(1,4)")
        plan = rv.plan(src, dst)
        ranks = range(NUM_RANKS)
        found = [InPlace.of(plan.program_of(rank), rank, ranks) for rank in ranks]
        assert len({each.copies for each in found}) == 1
        assert found[0].copies
        for rank in ranks:
            readers = {other for other in ranks if rank in found[other].owners}
            assert found[rank].readers == readers


def test_small_sources_are_staged() -> None:
    src, dst = rv.Layout(SHAPE, "R(1)V(1)D(4,1)"), rv.Layout(SHAPE, "R(1)V(1)D(1,4)")
    program = rv.plan(src, dst).program
    assert InPlace.of(program, 0, range(NUM_RANKS)).copies == frozenset()
