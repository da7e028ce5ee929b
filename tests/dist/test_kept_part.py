"""A source may be a view of its place in ``out``, as in a gather in place."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm.api.tensors import place_within
from rvdcomm.run.request import kept_place
from tests.dist.shards import error_of, faults_of, pool_of_all_sizes, shard_of
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


def in_place(shard: Tensor, out: Tensor, place: tuple[int, ...] | None) -> Tensor:
    """The shard as a view of ``out`` that begins at ``place``; unchanged if ``place`` is None."""
    if place is None:
        return shard
    part = out[tuple(slice(a, a + n) for a, n in zip(place, shard.shape, strict=True))]
    return part.copy_(shard)


def each_in_place(rank: int, executor: str) -> list[list[Any]]:
    group = dist.new_group(list(range(NUM_RANKS)))
    results = []
    for seed, (src, dst) in enumerate(pairs()):
        shard = shard_of(rank, src, seed)
        assert shard is not None
        out = torch.full(dst.cell(rank).box.shape, -1.0, dtype=shard.dtype)
        given = in_place(shard, out, kept_place(src, dst, rank))
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
def test_shard_may_be_a_view_of_its_place_in_out(worlds: Worlds, executor: str) -> None:
    ranks = worlds(NUM_RANKS).run(each_in_place, executor)
    assert len(pairs()) >= 15
    for seed, (src, dst) in enumerate(pairs()):
        for again in range(3):
            found = [results[seed][again] for results in ranks]
            assert faults_of(found, src, dst, seed=seed) == [], (src, dst)


def all_in_place(rank: int, executor: str, where: str) -> list[list[Any]]:
    """One call for all pairs, twice; outs lie apart, in one buffer (as of FSDP), or in the pool."""
    with pool_of_all_sizes():
        return _all_in_place(rank, executor, where)


def _all_in_place(rank: int, executor: str, where: str) -> list[list[Any]]:
    src, dst = ({str(i): pair[side] for i, pair in enumerate(pairs())} for side in (0, 1))
    shapes = {name: layout.cell(rank).box.shape for name, layout in dst.items()}
    sizes = [prod(shape) for shape in shapes.values()]
    flat = (rv.empty if where == "pool" else torch.empty)((sum(sizes),)).fill_(-1)
    parts = dict(zip(shapes, flat.split(sizes), strict=True))
    out = {name: parts[name].view(shape) for name, shape in shapes.items()}
    if where == "apart":
        out = {name: part.clone() for name, part in out.items()}
    shards, given = {}, {}
    for seed, name in enumerate(src):
        shards[name] = shard_of(rank, src[name], seed)
        place = kept_place(src[name], dst[name], rank)
        given[name] = in_place(shards[name], out[name], place)
    results = []
    for _ in range(2):
        found = rv.redistribute_many(given, src, dst, out=out, executor=executor)
        assert all(found[name] is out[name] for name in out)
        assert all(torch.equal(given[name], shards[name]) for name in src), "a source was modified"
        results.append([found[name].numpy().copy() for name in src])
    return results


@pytest.mark.parametrize("where", ["apart", "flat", "pool"])
@pytest.mark.parametrize("executor", EXECUTORS)
def test_shards_of_one_call_may_be_views_of_their_places_in_the_outs(
    worlds: Worlds, executor: str, where: str
) -> None:
    ranks = worlds(NUM_RANKS).run(all_in_place, executor, where)
    for seed, (src, dst) in enumerate(pairs()):
        for again in range(2):
            found = [results[again][seed] for results in ranks]
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
def test_shard_in_another_place_of_out_is_an_error_on_every_rank(
    worlds: Worlds, src: rv.Layout, dst: rv.Layout, start: int
) -> None:
    for errors in worlds(NUM_RANKS).run(misplaced, src, dst, start, 2):
        assert all("rank 2: out shares memory with the tensor" in error for error in errors)


def outs_of_one_buffer(num_apart: int) -> tuple[Tensor, Tensor]:
    """Room for two tensors of 8 elements, the second ``num_apart`` behind the first."""
    buffer = torch.zeros(16)
    return buffer[:8], buffer[num_apart : num_apart + 8]


def another_out(rank: int, bad: int, num_apart: int, first: int) -> list[str]:
    """Errors of two calls in which, on one rank, outs overlap or a tensor is in a wrong place."""
    src, dst = ({name: side for name in "ab"} for side in GATHER)
    a, b = outs_of_one_buffer(num_apart if rank == bad else 8)
    start = first if rank == bad else 2 * rank
    tensors = {"a": a[2 * rank : 2 * rank + 2], "b": b[start : start + 2]}

    def call() -> Any:
        return rv.redistribute_many(tensors, src, dst, out={"a": a, "b": b})

    return [error_of(call), error_of(call)]


@pytest.mark.parametrize(
    "num_apart, first, name", [(5, 4, "a"), (0, 4, "a"), (8, 2, "b")], ids=["both", "tied", "askew"]
)
def test_overlapping_outs_or_a_misplaced_shard_are_an_error_on_every_rank(
    worlds: Worlds, num_apart: int, first: int, name: str
) -> None:
    want = f"LayoutError: redistribute_many: tensor '{name}': rank 2: out shares memory with the "
    for errors in worlds(NUM_RANKS).run(another_out, 2, num_apart, first):
        assert all(error.startswith(want) for error in errors)


BLOCK = np.zeros((4, 6), np.float32)
OUT = torch.from_numpy(BLOCK)


@pytest.mark.parametrize(
    "tensor, out, place",
    [
        (OUT[1:3, 2:5], OUT, (1, 2)),
        (torch.from_numpy(BLOCK[1:3, 2:5]), OUT, (1, 2)),
        (OUT[::2], OUT, None),
        (OUT.view(-1)[4:8].view(2, 2), OUT, None),
        (OUT.view(torch.int32)[:2], OUT, None),
        (torch.zeros(2, 6), OUT, None),
        (OUT[:2], OUT[2:], None),
        ((z := torch.zeros(4, dtype=torch.complex64))[1:3], z, (1,)),
        (z[1:3].conj(), z, None),
    ],
    ids=[
        "part",
        "another storage of its memory",
        "every other row",
        "another shape",
        "another dtype",
        "apart",
        "beside",
        "complex",
        "lazily conjugated",
    ],
)
def test_place_within_finds_the_start_of_a_view_in_its_tensor(
    tensor: Tensor, out: Tensor, place: tuple[int, ...] | None
) -> None:
    assert place_within(tensor, out) == place
