"""Fine-tune a HuggingFace Llama on a text file by the Trainer of transformers and any plan.

    torchrun --nproc-per-node 4 examples/hf_trainer.py --plan hybrid:tp=2,microbatches=2

The script is that of one device; ``PlanTrainer`` stands in the place of ``Trainer``. Run it again
with more epochs, another plan or another number of processes: it continues with the last checkpoint
of its folder.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import transformers

from superscaler_core.integrations import PlanTrainer

ROOT = Path(__file__).parents[1]
LENGTH, BATCH = 32, 8
"""Bytes per sample, and samples per batch, over all processes."""


def new_model() -> transformers.PreTrainedModel:
    """A small Llama with random weights; its tokens are bytes."""
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=LENGTH,
    )
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config)


def samples(path: Path) -> list[dict[str, torch.Tensor]]:
    """The bytes of a text as samples of one length."""
    data = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8).long()
    rows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    return [{"input_ids": row, "labels": row} for row in rows]


def right_bytes(found: transformers.EvalPrediction) -> dict[str, float]:
    """The share of bytes that the model predicts."""
    right = found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]
    return {"right_bytes": float(right.mean())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--plan", default="zero3", help="any text of parallelize, as hybrid:tp=2")
    parser.add_argument("--text", type=Path, default=ROOT / "CONTRIBUTING.md")
    parser.add_argument("--folder", type=Path, default=Path("llama"), help="of the checkpoints")
    parser.add_argument("--epochs", type=int, default=1)
    options = parser.parse_args()

    texts = samples(options.text)
    args = transformers.TrainingArguments(
        str(options.folder),
        num_train_epochs=options.epochs,
        per_device_train_batch_size=BATCH,
        learning_rate=3e-3,
        logging_steps=10,
        save_strategy="epoch",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = PlanTrainer(
        new_model(),
        args,
        train_dataset=texts[:-BATCH],
        eval_dataset=texts[-BATCH:],
        compute_metrics=right_bytes,
        plan=options.plan,
    )
    trainer.train(resume_from_checkpoint=any(options.folder.glob("checkpoint-*")))
    found = trainer.evaluate()
    trainer.save_model(str(options.folder / "trained"))
    print(f"rank {args.process_index}: loss {found['eval_loss']:.4f}, all right", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
