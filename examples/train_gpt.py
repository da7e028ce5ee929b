"""Train a small GPT by a plan, on as many processes as torchrun starts.

    torchrun --nproc-per-node 4 examples/train_gpt.py --plan hybrid

Rank 0 captures and compiles the model; every rank then loads its own file and trains.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

import superscaler_core as ss
from superscaler_core.models import build, example_inputs
from superscaler_core.plans import PLANS


def compile_program(plan_name: str, num_devices: int, batch: int, folder: Path) -> None:
    """Compile a plan and write its program to a folder."""
    with torch.device("meta"):  # Planning needs no memory for the weights.
        model = build("gpt", "tiny", layers=4)
    graph = ss.capture(model, example_inputs("gpt", batch, layers=4))
    plan = ss.Plan(graph, range(num_devices))
    PLANS[plan_name](plan)
    compiled = ss.compile(plan)
    print(compiled.summary(), flush=True)
    compiled.save(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="data_parallel", choices=sorted(PLANS))
    parser.add_argument("--batch", type=int, default=8, help="sequences in a microbatch")
    parser.add_argument("--steps", type=int, default=5)
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    rank, num_devices = dist.get_rank(), dist.get_world_size()
    # One folder for all ranks of this run; with several hosts it must be on a shared file system.
    folder = Path(tempfile.gettempdir()) / f"superscaler-{os.environ['MASTER_PORT']}"
    if rank == 0:
        compile_program(args.plan, num_devices, args.batch, folder)
    dist.barrier()
    trainer = ss.load(folder, seed=1)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(folder)

    torch.manual_seed(0)
    trainer.load_state_dict(build("gpt", "tiny", layers=4).state_dict())
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=1e-2)
    losses = []
    for step in range(args.steps):
        rows = args.batch * trainer.num_microbatches
        loss = trainer.step(*example_inputs("gpt", rows, layers=4))
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {losses[-1]:.4f}", flush=True)
    assert losses[-1] < losses[0], "the same batch again and again is learnt"
    print(f"rank {rank}: all right", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
