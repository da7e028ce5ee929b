from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import rvdcomm as rv
from rvdcomm.checkpoint import commit_shards, load_shards, save_shards
from rvdcomm.layout import Box
from tests.checkpoint.models import SHARDED, SOURCES, are_equal, make, model, shard_of
from tests.covering import each_value

WANTED = {
    "embed.weight": rv.Layout((7, 10), "R(1)V(1)D(1,4)"),
    "layers.0.q.weight": rv.Layout((9, 5), "R(4)V(1)D(1,1)"),
    "layers.0.o.weight": rv.Layout((6, 4, 3), "R(1)V(1)D(2,1,2)"),
    "layers.0.fp8": rv.Layout((5, 3), "R(1)V(4)D(1,1)"),
    "ids": rv.Layout((11,), "R(1)V(1)D(3)", ranks=[3, 0, 2]),
    "mask": rv.Layout((3,), "R(1)V(1)D(4)"),
    "scale": rv.Layout((), "R(4)V(1)D()"),
    "empty": rv.Layout((0, 4), "R(1)V(1)D(4,1)"),
}


@each_value(kind=SOURCES, rank=range(4))
def test_ranks_load_their_shards_of_any_checkpoint(kind: str, rank: int, tmp_path: Path) -> None:
    whole = model()
    expected = {
        name: whole[name][layout.cell(rank).box.slices_within(Box.of_shape(layout.shape))]
        for name, layout in WANTED.items()
        if rank in layout
    }
    if WANTED["layers.0.fp8"].cell(rank).part:
        expected["layers.0.fp8"] = torch.zeros(5, 3).to(torch.float8_e4m3fn)
    assert are_equal(load_shards(make(kind, tmp_path), WANTED, rank), expected)


def test_rank_reads_only_the_bytes_of_its_shard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make("whole", tmp_path)
    read = []
    preadv = os.preadv

    def counting(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        read.append(preadv(descriptor, buffers, offset))
        return read[-1]

    monkeypatch.setattr("rvdcomm.checkpoint.reader.os.preadv", counting)
    found = load_shards(src, {"embed.weight": WANTED["embed.weight"]}, 1)
    assert sum(read) == found["embed.weight"].nbytes == 7 * 3 * 4


def test_checkpoint_is_complete_only_after_its_commit(tmp_path: Path) -> None:
    layout = rv.Layout((5,), "R(1)V(1)D(2)")
    save_shards(tmp_path, {"w": torch.ones(3)}, {"w": layout}, 0)
    with pytest.raises(
        rv.CheckpointError,
        match=r"rank 1 has saved no shards as rank-00001.safetensors \('rank-00000.*; call save",
    ):
        commit_shards(tmp_path, [0, 1])
    save_shards(tmp_path, {"w": torch.zeros(2)}, {"w": layout}, 1)
    commit_shards(tmp_path, [0, 1])
    whole = load_shards(tmp_path, {"w": rv.Layout((5,), "R(1)V(1)D(1)")}, 0)["w"]
    assert whole.tolist() == [1, 1, 1, 0, 0]
    with pytest.raises(rv.CheckpointError, match="holds a complete checkpoint"):
        save_shards(tmp_path, {"w": torch.ones(3)}, {"w": layout}, 0)


@pytest.mark.parametrize(
    "tensors, message",
    [
        ({}, r"rank 0 passes 0 tensors and 1 layouts hold it; they differ in \['w'\]"),
        ({"w": torch.ones(4)}, r"rank 0 passes 'w' \[4\], its shard under .* is \[3\]"),
    ],
)
def test_tensors_that_do_not_match_the_layouts_are_rejected(
    tensors: dict[str, torch.Tensor], message: str, tmp_path: Path
) -> None:
    with pytest.raises(rv.ShapeMismatchError, match=message):
        save_shards(tmp_path, tensors, {"w": rv.Layout((5,), "R(1)V(1)D(2)")}, 0)


def test_save_without_layouts_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(rv.LayoutError, match="rank 0 passes no layouts; there is no tensor to"):
        save_shards(tmp_path, {}, {}, 0)


@pytest.mark.parametrize("tensor", [torch.arange(4.0)[2::2], torch.arange(4.0)[4::2]], ids=len)
def test_strided_shards_of_one_element_or_none_are_saved(
    tensor: torch.Tensor, tmp_path: Path
) -> None:
    layouts = {"w": rv.Layout(tensor.shape, "R(1)V(1)D(1)")}
    save_shards(tmp_path, {"w": tensor}, layouts, 0)
    commit_shards(tmp_path, [0])
    assert torch.equal(load_shards(tmp_path, layouts, 0)["w"], tensor)


def test_commit_names_ranks_with_different_dtypes(tmp_path: Path) -> None:
    layout = rv.Layout((5,), "R(1)V(1)D(2)")
    for rank, dtype in ((0, torch.float32), (1, torch.float64)):
        shard = shard_of(torch.arange(5, dtype=dtype), layout, rank)
        save_shards(tmp_path, {"w": shard}, {"w": layout}, rank)
    with pytest.raises(rv.CheckpointError, match=r"rank 1 saved 'w' as float64 .* as float32"):
        commit_shards(tmp_path, [0, 1])


def test_load_of_a_wrong_shape_is_rejected(tmp_path: Path) -> None:
    src = make("sharded", tmp_path)
    with pytest.raises(rv.LayoutError, match=r"tensor 'mask' has shape \(3,\), its layout is"):
        load_shards(src, {"mask": WANTED["ids"]}, 0)
    assert set(SHARDED) == set(WANTED)
