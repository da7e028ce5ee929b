"""LoRA: a Llama from its folder, of which adapters of low rank alone are trained and saved.

    torchrun --nproc-per-node 2 examples/adapters.py --plan megatron
    torchrun --nproc-per-node 4 examples/adapters.py --plan hybrid:tp=2,pp=2,microbatches=2

Frozen weights have no gradients and no optimizer states. The saved adapters, merged into the
weights of the folder on one device, give the loss of the trained model.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, LlamaConfig

import superscaler_core as ss

CONFIG = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, use_cache=False,
)  # fmt: skip


class Adapted(nn.Linear):
    """A frozen linear layer with a trained product of low rank beside it."""

    down: nn.Linear
    up: nn.Linear

    @classmethod
    def of(cls, line: nn.Linear, rank: int = 4) -> None:
        """Change a layer into an adapted one, which computes the same at first."""
        line.requires_grad_(False)
        line.__class__ = cls
        line.down = nn.Linear(line.in_features, rank, bias=False)
        line.up = nn.Linear(rank, line.out_features, bias=False)
        nn.init.zeros_(line.up.weight)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x))


def adapted(folder: Path) -> Any:
    """The model of a folder with adapters in its attentions."""
    model = AutoModelForCausalLM.from_pretrained(folder, use_cache=False).requires_grad_(False)
    torch.manual_seed(2)
    for name, module in model.named_modules():
        if name.endswith(("q_proj", "v_proj")):
            Adapted.of(module)
    return model


def merged(folder: Path, adapters: dict[str, Tensor]) -> Any:
    """The model of a folder whose weights have the adapters in them."""
    model = AutoModelForCausalLM.from_pretrained(folder, use_cache=False)
    for name, up in adapters.items():
        if name.endswith(".up.weight"):
            path = name.removesuffix(".up.weight")
            model.get_parameter(f"{path}.weight").data += up @ adapters[f"{path}.down.weight"]
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="megatron", help="any text of parallelize")
    args = parser.parse_args()

    rank = int(os.environ.get("RANK", 0))
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    if rank == 0:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(CONFIG).save_pretrained(folders[0])
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        dist.broadcast_object_list(folders)
    folder = Path(folders[0])

    ids = torch.arange(128).view(8, 16) % 64
    batch = {"input_ids": ids, "labels": ids}
    model = ss.parallelize(adapted(folder), kwargs=batch, plan=args.plan)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)
    first = model.evaluate(**batch).item()
    for _ in range(10):
        model.step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    last = model.evaluate(**batch).item()
    adapters = model.state_dict(trained_only=True)
    if rank == 0:
        print(f"loss {first:.4f} -> {last:.4f}, {len(adapters)} tensors of adapters", flush=True)
    assert last < first
    alone = merged(folder, adapters)(**batch).loss.item()
    assert abs(alone - last) < 1e-4 * last, (alone, last)
    print(f"rank {rank}: all right", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
