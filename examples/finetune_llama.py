"""Fine-tune a HuggingFace Llama on a text file by any plan; resume by another plan after a kill.

    torchrun --nproc-per-node 4 examples/finetune_llama.py --plan zero3 --die-after 10
    torchrun --nproc-per-node 2 examples/finetune_llama.py --plan one_f_one_b

Every step saves a checkpoint, and a run begins with the last complete checkpoint in its folder. A
run that was killed therefore resumes, by any plan on any number of processes, as if it had not been
interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

import superscaler_core as ss

ROOT = Path(__file__).parents[1]
LENGTH, BATCH = 32, 8
"""Bytes per sample, and samples per batch."""


def new_model(dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """A small Llama with random weights; its tokens are bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
        attn_implementation="sdpa",
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).to(dtype).train()


def batches(path: Path) -> list[torch.Tensor]:
    """The text as batches of bytes, in order; the last batch may be smaller."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    return list(rows.split(BATCH))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="zero3", help="any text of parallelize, as hybrid:tp=2")
    parser.add_argument("--text", type=Path, default=ROOT / "CONTRIBUTING.md")
    parser.add_argument("--folder", type=Path, default=Path("llama"), help="of the checkpoints")
    parser.add_argument("--steps", type=int, default=20, help="of the whole training")
    parser.add_argument("--dtype", default="float32", choices=("bfloat16", "float32", "float64"))
    parser.add_argument("--die-after", type=int, help="kill this process after so many steps")
    args = parser.parse_args()

    texts = batches(args.text)
    model = ss.parallelize(
        new_model(getattr(torch, args.dtype)),
        kwargs={"input_ids": texts[0], "labels": texts[0]},
        plan=args.plan,
        results=("logits",),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=args.steps)
    first = 0
    if (saved := ss.latest(args.folder)) is not None:
        first = model.load(saved, optimizer=optimizer, scheduler=schedule).step or 0
    rank = model.trainer.rank
    for step in range(first, args.steps):
        rows = texts[step % len(texts)]
        loss = model.step(input_ids=rows, labels=rows)
        model.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.6f}", flush=True)
        folder = args.folder / f"step-{step + 1}"
        model.save(folder, optimizer=optimizer, scheduler=schedule, step=step + 1)
        if step + 1 == args.die_after:
            os.kill(os.getpid(), signal.SIGKILL)
    rows = texts[-1]
    loss, results = model.evaluate(input_ids=rows, labels=rows)
    right = (results["logits"][:, :-1].argmax(-1) == rows[:, 1:]).double().mean()
    if rank == 0:
        print(f"last batch: loss {loss.item():.4f}, {right:.0%} of bytes right", flush=True)
    print(f"rank {rank}: all right", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
