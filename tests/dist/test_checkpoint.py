"""Checkpoints of real processes: other ranks read the files that ranks save together."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
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


def save_by_torch(rank: int, folder: str, is_safetensors: bool) -> None:
    writer = dcp.HuggingFaceStorageWriter(folder, save_distributed=True) if is_safetensors else None
    dcp.save(sharded_state(), checkpoint_id=folder, storage_writer=writer)


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


@pytest.mark.parametrize("is_safetensors", [False, True])
def test_checkpoint_that_ranks_save_by_torch_is_read(
    is_safetensors: bool, worlds: Worlds, tmp_path: Path
) -> None:
    worlds(3).run(save_by_torch, str(tmp_path / "src"), is_safetensors)
    assert len(open_checkpoint(tmp_path / "src").tensors["columns"].blocks) == 3
    reshard(tmp_path / "src", tmp_path / "dst", to="whole", verify=True)
    assert_whole(tmp_path / "dst")


def test_checkpoint_that_rvdcomm_writes_is_loaded_by_torch(worlds: Worlds, tmp_path: Path) -> None:
    worlds(3).run(save_by_us, str(tmp_path / "src"))
    rules = Rules({"rows": "R(1)V(1)D(2,2)", "columns": "R(1)V(1)D(1,4)"}, ranks=range(4))
    reshard(tmp_path / "src", tmp_path / "dst", rules, to="dcp", verify=True)
    assert worlds(2).run(load_by_torch, str(tmp_path / "dst")) == [True, True]


def test_checkpoint_that_ranks_save_by_rvdcomm_is_read(worlds: Worlds, tmp_path: Path) -> None:
    worlds(3).run(save_by_us, str(tmp_path / "src"))
    reshard(tmp_path / "src", tmp_path / "dst", to="whole", verify=True)
    assert_whole(tmp_path / "dst")
