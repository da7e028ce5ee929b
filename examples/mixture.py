"""A Mixtral from its folder and back, with experts dealt out; its training is that of one device.

    torchrun --nproc-per-node 2 examples/mixture.py --plan data_parallel:experts=true
    torchrun --nproc-per-node 4 examples/mixture.py --plan hybrid:pp=2,microbatches=2,experts=true

The model is made without values, and each rank reads the boxes that the plan stores on it. After
some steps all ranks write a folder, which transformers reads on one device.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig

import superscaler_core as ss

CONFIG = MixtralConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, use_cache=False,
)  # fmt: skip


def batches() -> list[dict[str, Tensor]]:
    """Random tokens, the same on all ranks."""
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(64, (5, 8, 16), generator=generator)
    return [{"input_ids": rows, "labels": rows} for rows in ids]


def trained(folder: Path) -> Any:
    """The model of a folder after the same steps on one device."""
    model = AutoModelForCausalLM.from_pretrained(folder, use_cache=False).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches():
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="data_parallel:experts=true")
    args = parser.parse_args()

    is_one_of_several = "RANK" in os.environ
    rank = int(os.environ.get("RANK", 0))
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    if rank == 0:
        torch.manual_seed(0)
        # In the form of the hub, in which each expert has tensors of its own.
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(Path(folders[0]) / "first")
    if is_one_of_several:
        dist.init_process_group("gloo")
        dist.broadcast_object_list(folders)
    folder = Path(folders[0])

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder / "first"))
    model = ss.parallelize(
        empty.train(), kwargs=batches()[0], plan=args.plan, weights=folder / "first"
    )
    own = {n: p.shape[0] for n, p in model.named_parameters() if n.endswith("experts.down_proj")}
    print(f"rank {rank} stores experts of {len(own)} layers: {sum(own.values())}", flush=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for batch in batches():
        model.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder / "tuned")
    found = AutoModelForCausalLM.from_pretrained(folder / "tuned").state_dict()
    for name, value in trained(folder / "first").state_dict().items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-4)
    print(f"rank {rank}: all right", flush=True)
    if is_one_of_several:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
