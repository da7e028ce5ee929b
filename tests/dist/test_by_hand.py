"""What the benchmark's ways by hand make of a tensor is what plans make of it."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import rvdcomm as rv
from bench.rvd.by_hand import by_hand
from bench.rvd.cases import definitions
from tests.dist.on_ranks import on_ranks

NUM = 4


@pytest.mark.dist
@on_ranks(NUM)
def test_ways_by_hand_move_what_plans_move(rank: int) -> None:
    group, names = dist.group.WORLD, set()
    assert group is not None
    for texts in definitions()["categories"].values():
        src, dst = (rv.Layout((8, 12), text.format(n=NUM, m=NUM)) for text in texts)
        shape = src.cell(rank).box.shape
        shard = torch.arange(float(torch.Size(shape).numel())).view(shape) + 100 * rank
        if src.rvd.r > 1:
            shard -= 100 * rank  # replicas are equal
        wanted, before = rv.redistribute(shard, src, dst), shard.clone()
        for name, way in by_hand(group, src, dst).items():
            assert torch.equal(way(shard), wanted), (name, texts)
            assert torch.equal(shard, before), name
            names.add(name)
    assert len(names) == 7


@pytest.mark.parametrize("texts", [("R(4)V(1)D(1,1)", "R(4)V(1)D(1,1)")])
def test_nothing_is_done_by_hand_where_nothing_moves(texts: tuple[str, str]) -> None:
    src, dst = (rv.Layout((8, 8), text) for text in texts)
    assert by_hand(None, src, dst) == {}  # type: ignore[arg-type]
