"""A source may be a view of its place in ``out``, as in a gather in place."""

from __future__ import annotations

from functools import partial
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
from tests.dist.on_ranks import assert_moved, on_ranks
from tests.dist.shards import error_of, pool_of_all_sizes, shard_of
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


@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(NUM_RANKS)
def test_shard_may_be_a_view_of_its_place_in_out(rank: int, executor: str) -> None:
    group = dist.new_group(list(range(NUM_RANKS)))
    options: dict[str, Any] = {"group": group, "executor": executor}
    assert len(pairs()) >= 15
    for seed, (src, dst) in enumerate(pairs()):
        shard = shard_of(rank, src, seed)
        out = torch.full(dst.cell(rank).box.shape, -1.0, dtype=shard.dtype)
        given = in_place(shard, out, kept_place(src, dst, rank))
        call = rv.Redistributor(rv.plan(src, dst), **options)
        for again in (call, partial(rv.redistribute, src=src, dst=dst, **options), call):
            assert again(given, out=out) is out
            assert torch.equal(given, shard), "a source was modified"
            assert_moved(out, src, dst, seed)


@pytest.mark.parametrize("where", ["apart", "flat", "pool"])
@pytest.mark.parametrize("executor", EXECUTORS)
@on_ranks(NUM_RANKS)
def test_shards_of_one_call_may_be_views_of_their_places_in_the_outs(
    rank: int, executor: str, where: str
) -> None:
    """One call for all pairs, twice; outs lie apart, in one buffer (as of FSDP), or in the pool."""
    src, dst = ({str(i): pair[side] for i, pair in enumerate(pairs())} for side in (0, 1))
    shapes = {name: layout.cell(rank).box.shape for name, layout in dst.items()}
    sizes = [prod(shape) for shape in shapes.values()]
    with pool_of_all_sizes():
        flat = (rv.empty if where == "pool" else torch.empty)((sum(sizes),)).fill_(-1)
        parts = dict(zip(shapes, flat.split(sizes), strict=True))
        out = {name: parts[name].view(shape) for name, shape in shapes.items()}
        if where == "apart":
            out = {name: part.clone() for name, part in out.items()}
        shards = {name: shard_of(rank, layout, int(name)) for name, layout in src.items()}
        given = {
            name: in_place(shards[name], out[name], kept_place(src[name], dst[name], rank))
            for name in src
        }
        for _ in range(2):
            found = rv.redistribute_many(given, src, dst, out=out, executor=executor)
            for name in src:
                assert found[name] is out[name]
                assert torch.equal(given[name], shards[name]), "a source was modified"
                assert_moved(found[name], src[name], dst[name], int(name))


GATHER = rv.Layout((8,), "R(1)V(1)D(4)"), rv.Layout((8,), "R(4)V(1)D(1)")
SUM = rv.Layout((8,), "R(1)V(4)D(1)"), rv.Layout((8,), "R(4)V(1)D(1)")


@pytest.mark.parametrize(
    "src, dst, start", [(*GATHER, 0), (*GATHER, 5), (*SUM, 0)], ids=["other", "askew", "sum"]
)
@on_ranks(NUM_RANKS)
def test_shard_in_another_place_of_out_is_an_error_on_every_rank(
    rank: int, src: rv.Layout, dst: rv.Layout, start: int
) -> None:
    """Rank 2 passes another part of ``out``, in two calls."""
    group = dist.new_group(list(range(NUM_RANKS)))
    size = src.cell(rank).box.shape[0]
    out = torch.zeros(8)
    tensor = out[start : start + size] if rank == 2 else torch.zeros(size)
    for _ in range(2):
        error = error_of(lambda: rv.redistribute(tensor, src, dst, out=out, group=group))
        assert "rank 2: out shares memory with the tensor" in error


@pytest.mark.parametrize(
    "num_apart, first, name", [(5, 4, "a"), (0, 4, "a"), (8, 2, "b")], ids=["both", "tied", "askew"]
)
@on_ranks(NUM_RANKS)
def test_overlapping_outs_or_a_misplaced_shard_are_an_error_on_every_rank(
    rank: int, num_apart: int, first: int, name: str
) -> None:
    """On rank 2, in two calls: the second out begins ``num_apart`` elements behind the first."""
    src, dst = ({name: side for name in "ab"} for side in GATHER)
    buffer = torch.zeros(16)
    apart, start = (num_apart, first) if rank == 2 else (8, 2 * rank)
    a, b = buffer[:8], buffer[apart : apart + 8]
    tensors = {"a": a[2 * rank : 2 * rank + 2], "b": b[start : start + 2]}
    want = f"LayoutError: redistribute_many: tensor '{name}': rank 2: out shares memory with the "
    for _ in range(2):
        error = error_of(lambda: rv.redistribute_many(tensors, src, dst, out={"a": a, "b": b}))
        assert error.startswith(want)


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
