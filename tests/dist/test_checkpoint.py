"""Checkpoints of real processes: other ranks read the files that ranks save together."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import rvdcomm as rv
from rvdcomm.checkpoint import Rules, commit_shards, open_checkpoint, reshard, save_shards
from tests.dist.world import Worlds

pytestmark = pytest.mark.dist

WHOLE = {
    "rows": torch.arange(35.0).reshape(7, 5),
    "columns": torch.arange(33).reshape(3, 11),
    "everywhere": torch.arange(6).bfloat16(),
}
PLACEMENTS = {"rows": Shard(0), "columns": Shard(1), "everywhere": Replicate()}


def sharded_state() -> dict[str, torch.Tensor]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {n: distribute_tensor(t, mesh, [PLACEMENTS[n]]) for n, t in WHOLE.items()}


def save_by_torch(rank: int, folder: str, kind: str) -> None:
    state: dict[str, Any] = dict(sharded_state())
    options: dict[str, Any] = {"use_collectives": "alone" not in kind}
    if kind == "stages":  # Each rank saves the whole tensors of its pipeline stage.
        names = list(WHOLE)
        state = {names[rank]: WHOLE[names[rank]]}
        options["storage_writer"] = dcp.HuggingFaceStorageWriter(
            folder, {name: i + 1 for i, name in enumerate(names)}, save_distributed=True
        )
    elif kind == "hugging face":
        options["storage_writer"] = dcp.HuggingFaceStorageWriter(folder, save_distributed=True)
    elif "safetensors" in kind:
        form = SerializationFormat.SAFETENSORS
        options["storage_writer"] = dcp.FileSystemWriter(folder, serialization_format=form)
    if "counter" in kind:
        state["counter"] = torch.tensor(rank)
    with warnings.catch_warnings():
        # Without collectives a rank may have written before another one looks.
        warnings.filterwarnings("ignore", "Detected an existing checkpoint")
        dcp.save(state, checkpoint_id=folder, **options)


def load_by_torch(rank: int, folder: str) -> bool:
    state = sharded_state()
    for tensor in state.values():
        tensor.to_local().zero_()
    dcp.load(state, checkpoint_id=folder)
    return all(torch.equal(tensor.full_tensor(), WHOLE[name]) for name, tensor in state.items())


def save_by_us(rank: int, folder: str) -> None:
    layouts = {
        "rows": rv.Layout((7, 5), "R(1)V(1)D(3,1)"),
        "columns": rv.Layout((3, 11), "R(1)V(1)D(1,3)", cuts="balanced"),
        "everywhere": rv.Layout((6,), "R(3)V(1)D(1)"),
    }
    boxes = {name: layout.cell(rank).box for name, layout in layouts.items()}
    shards = {
        name: WHOLE[name][tuple(slice(a, b) for a, b in zip(box.lo, box.hi, strict=True))]
        for name, box in boxes.items()
    }
    save_shards(folder, shards, layouts, rank)
    dist.barrier()
    if rank == 0:
        commit_shards(folder, range(3))


def assert_whole(folder: Path) -> None:
    found = load_file(folder / "model.safetensors")
    assert set(found) == set(WHOLE)
    assert all(torch.equal(found[name], WHOLE[name]) for name in WHOLE)


KINDS = ("dcp", "hugging face", "stages", "safetensors alone")


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoint_that_ranks_save_by_torch_is_read(
    kind: str, worlds: Worlds, tmp_path: Path
) -> None:
    worlds(3).run(save_by_torch, str(tmp_path / "src"), kind)
    num_blocks = 1 if kind == "stages" else 3
    assert len(open_checkpoint(tmp_path / "src").tensors["columns"].blocks) == num_blocks
    reshard(tmp_path / "src", tmp_path / "dst", to="whole", verify=True)
    assert_whole(tmp_path / "dst")


@pytest.mark.parametrize("kind", ["alone, a counter", "safetensors alone, a counter"])
def test_different_values_of_ranks_under_one_name_are_rejected(
    kind: str, worlds: Worlds, tmp_path: Path
) -> None:
    worlds(3).run(save_by_torch, str(tmp_path / "src"), kind)
    message = r"__0_0.distcp and __1_0.distcp have different values of 'counter' \[\], so each"
    with pytest.raises(rv.CheckpointError, match=message):
        open_checkpoint(tmp_path / "src")
    for lost in (0, 2):  # Of rank 2, its tensors tell.
        (tmp_path / f"src/__{lost}.metadata").rename(tmp_path / "lost")
        with pytest.raises(rv.CheckpointError, match=rf"there and __{lost}.metadata is missing"):
            open_checkpoint(tmp_path / "src")
        (tmp_path / "lost").rename(tmp_path / f"src/__{lost}.metadata")
    (tmp_path / f"src/__{'9' * 12}.metadata").touch()
    with pytest.raises(rv.CheckpointError, match=r"9.metadata is there and __3.metadata is miss"):
        open_checkpoint(tmp_path / "src")


def test_checkpoint_that_rvdcomm_writes_is_loaded_by_torch(worlds: Worlds, tmp_path: Path) -> None:
    worlds(3).run(save_by_us, str(tmp_path / "src"))
    reshard(tmp_path / "src", tmp_path / "whole", to="whole", verify=True)
    assert_whole(tmp_path / "whole")
    rules = Rules({"rows": "R(1)V(1)D(2,2)", "columns": "R(1)V(1)D(1,4)"}, ranks=range(4))
    reshard(tmp_path / "src", tmp_path / "dst", rules, to="dcp", verify=True)
    assert worlds(2).run(load_by_torch, str(tmp_path / "dst")) == [True, True]
