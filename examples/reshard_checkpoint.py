"""Reshard a checkpoint from two tensor-parallel ranks to three, then to one safetensors file.

Run it: python examples/reshard_checkpoint.py
"""

import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

import rvdcomm as rv
from rvdcomm.checkpoint import Rules, commit_shards, plan_reshard, reshard, save_shards

# The model and its layouts on two ranks: one matrix is split by rows, the other by columns.
model = {"up.weight": torch.randn(512, 300), "down.weight": torch.randn(300, 512)}
layouts = {
    "up.weight": rv.Layout((512, 300), "R(1)V(1)D(2,1)"),
    "down.weight": rv.Layout((300, 512), "R(1)V(1)D(1,2)"),
}

with tempfile.TemporaryDirectory() as folder:
    root = Path(folder)
    # In a training job, every rank saves its own shards; then one rank commits.
    for rank in range(2):
        shards = {
            "up.weight": model["up.weight"].chunk(2, dim=0)[rank],
            "down.weight": model["down.weight"].chunk(2, dim=1)[rank],
        }
        save_shards(root / "tp2", shards, layouts, rank)
    commit_shards(root / "tp2", range(2))

    rules = Rules({"up.*": "R(1)V(1)D(3,1)", "down.*": "R(1)V(1)D(1,3)"}, ranks=range(3))
    print(plan_reshard(root / "tp2", rules, memory_limit=256 << 10))
    reshard(root / "tp2", root / "tp3", rules, memory_limit=256 << 10, verify=True)

    reshard(root / "tp3", root / "whole", to="whole")
    found = load_file(root / "whole/model.safetensors")
    assert all(torch.equal(found[name], tensor) for name, tensor in model.items())
    print("2 ranks to 3 to one file: the same bits")
