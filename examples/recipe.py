"""A whole training recipe under any plan: groups, Muon, accumulation, clipping, EMA, adapters.

    torchrun --nproc-per-node 4 examples/recipe.py --plan zero3:keep=block_inputs
    torchrun --nproc-per-node 2 examples/recipe.py --plan one_f_one_b:microbatches=2,zero=1

Matrices are stepped by Muon, which needs them whole, and vectors by AdamW in two groups. Every
update adds up the gradients of three batches, the last of which may be smaller. The same recipe
then runs on one device, and the weights, the averages and the losses of both are compared.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import TensorDataset

import superscaler_core as ss
from superscaler_core.parallel import OwnBatches

SAMPLES, BATCH, ACCUMULATED, DECAY = 44, 8, 3, 0.9


def batched(batches: Iterator[Any], num: int) -> Iterator[list[Any]]:
    """Lists of so many batches; the last may be shorter."""
    while found := list(islice(batches, num)):
        yield found


class Adapted(nn.Module):
    """A linear layer that is frozen, with a trained adapter of low rank."""

    def __init__(self, width: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class Model(nn.Module):
    """Blocks of a norm, an adapted layer and an MLP."""

    def __init__(self, width: int = 16, layers: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(Adapted(width) for _ in range(layers))
        self.mlps = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        for norm, layer, mlp in zip(self.norms, self.layers, self.mlps, strict=True):
            x = x + mlp(torch.tanh(layer(norm(x))))
        return {"loss": (x - y).square().mean(), "prediction": x}


def groups(named: Iterable[tuple[str, Tensor]]) -> tuple[list[Any], list[dict[str, Any]]]:
    """Matrices for Muon; and vectors for AdamW, of which norms have no weight decay."""
    named = list(named)
    vectors = [(name, p) for name, p in named if p.ndim < 2]
    norms = [p for name, p in vectors if name.startswith("norms")]
    biases = [p for name, p in vectors if not name.startswith("norms")]
    matrices = [p for _, p in named if p.ndim == 2]
    return matrices, [{"params": biases}, {"params": norms, "weight_decay": 0.0}]


def parallel(batches: Iterator[Any], model: ss.Parallel, folder: Path) -> dict[str, Any]:
    """The recipe under a plan."""
    matrices, vectors = groups(model.named_parameters())
    muon = ss.optim.whole(torch.optim.Muon, model, matrices, lr=0.02)
    adamw = torch.optim.AdamW(vectors, lr=0.01)
    ema = ss.optim.Averaged(model, decay=DECAY)
    losses = []
    for parts in batched(batches, ACCUMULATED):
        for x, y in parts:
            with model.scaled(1 / len(parts)):
                losses.append(model.step(x=x, y=y))
            assert model.results["prediction"].shape == x.shape
        model.clip_grad_norm_(1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        ema.update()
    model.save(folder, optimizer=[muon, adamw], step=len(losses))
    assert model.load(folder, optimizer=[muon, adamw]).step == len(losses)
    adapters = model.state_dict(trained_only=True)
    assert not any("base" in name for name in adapters)
    found = {"weights": model.state_dict(), "losses": losses}
    with ema.applied():
        return {**found, "averages": model.state_dict()}


def alone(batches: Iterator[Any], model: nn.Module) -> dict[str, Any]:
    """The recipe on one device, in plain torch."""
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    matrices, vectors = groups(trained)
    muon, adamw = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(vectors, lr=0.01)
    ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(DECAY))
    losses = []
    for parts in batched(batches, ACCUMULATED):
        for x, y in parts:
            loss = model(x=x, y=y)["loss"]
            (loss / len(parts)).backward()
            losses.append(loss.detach())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in (muon, adamw):
            optimizer.step()
            optimizer.zero_grad()
        ema.update_parameters(model)
    averages = ema.module.state_dict()
    return {"weights": model.state_dict(), "losses": losses, "averages": averages}


def new_model() -> Model:
    torch.manual_seed(0)
    return Model()


def data() -> TensorDataset:
    x = torch.randn(SAMPLES, 16, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, x.flip(1).sin())


def difference(one: Any, other: Any) -> float:
    """The largest relative difference of two results."""
    if isinstance(one, dict):
        return max(difference(one[key], other[key]) for key in other)
    if isinstance(one, list):
        return max(map(difference, one, other))
    return float((one - other).abs().max() / other.abs().max().clamp(min=1e-6))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="zero1")
    args = parser.parse_args()
    samples = data()
    x, y = samples[:BATCH]
    model = ss.parallelize(
        new_model(), kwargs={"x": x, "y": y}, plan=args.plan, step_results=("prediction",)
    )
    rank = model.trainer.rank
    folders: list[Any] = [tempfile.mkdtemp() if rank == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(folders)
    loader = model.loader(samples, BATCH, shuffle=True)
    found = parallel(iter(loader), model, Path(folders[0]) / "saved")
    same = OwnBatches(SAMPLES, BATCH, shuffle=True)
    want = alone((samples[own] for own in same), new_model())
    for what, value in want.items():
        far = difference(found[what], value)
        # Muon multiplies in bfloat16, where a last bit of a sum may count.
        assert far < 0.02, f"{what} differ by {far}"
        if rank == 0:
            print(f"{what}: largest relative difference from one device {far:.1e}", flush=True)
    print(f"rank {rank}: all right", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
