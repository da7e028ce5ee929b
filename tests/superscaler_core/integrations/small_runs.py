"""Small trainings by the Trainer of transformers, plain and by a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from torch.utils.data import Dataset

from superscaler_core.integrations import PlanTrainer

LENGTH, WORDS = 10, 50

Logs = list[dict[str, float]]
Item = dict[str, Tensor]


class Rows(Dataset[Item]):
    """Rows of random tokens, of which different numbers are labels."""

    def __init__(self, num_rows: int, seed: int) -> None:
        draws = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(WORDS, (num_rows, LENGTH), generator=draws)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Item:
        labels = self.rows[index].clone()
        labels[: index % 5] = -100
        return {"input_ids": self.rows[index], "labels": labels}


class Words(nn.Module):
    """A model outside transformers, whose loss is the mean of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 8)
        self.head = nn.Linear(8, WORDS)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.table(input_ids).tanh())
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def llama() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=WORDS,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    return transformers.LlamaForCausalLM(config)


def words() -> nn.Module:
    torch.manual_seed(0)
    return Words()


def frozen() -> nn.Module:
    model = llama()
    model.get_input_embeddings().weight.requires_grad_(False)
    return model


def recomputed() -> nn.Module:
    model = llama()
    model.activation_checkpointing_enable()
    return model


MODELS = {"llama": llama, "words": words, "frozen": frozen, "recomputed": recomputed}


def accuracy(found: Any) -> dict[str, float]:
    return {
        "accuracy": float((found.predictions[:, :-1].argmax(-1) == found.label_ids[:, 1:]).mean())
    }


def arguments(folder: Path, **options: Any) -> transformers.TrainingArguments:
    """Two epochs of 11 samples in batches of 4, of which two are accumulated."""
    return transformers.TrainingArguments(
        str(folder),
        **{
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 4,
            "gradient_accumulation_steps": 2,
            "num_train_epochs": 2,
            "learning_rate": 1e-2,
            "weight_decay": 0.1,
            # Gradients that are zero up to rounding do not decide the comparison.
            "adam_epsilon": 1e-3,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "eval_strategy": "epoch",
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            **options,
        },
    )


class Stop(transformers.TrainerCallback):
    """Ends a training after some steps, as a break of the process does."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        # After the save and the evaluation of this step.
        control.should_training_stop = state.global_step == self.after


def trainer(
    folder: Path,
    plan: str | None,
    options: Mapping[str, Any] = MappingProxyType({}),
    model: str = "llama",
    **more: Any,
) -> transformers.Trainer:
    """A trainer with arguments ``options``; a plain one if there is no plan."""
    given = {
        "model": MODELS[model](),
        "args": arguments(folder, **options),
        "train_dataset": Rows(11, seed=0),
        "eval_dataset": Rows(7, seed=1),
        "compute_metrics": accuracy,
        **more,
    }
    made = transformers.Trainer(**given) if plan is None else PlanTrainer(plan=plan, **given)
    # It prints every log.
    made.remove_callback(transformers.PrinterCallback)
    return made


def logs_of(made: transformers.Trainer) -> Logs:
    """What a trainer logged, without times and numbers of operations."""
    timed = ("runtime", "per_second", "preparation_time", "total_flos")
    return [
        {name: value for name, value in log.items() if not name.endswith(timed)}
        for log in made.state.log_history
    ]


def trained(
    rank: int,
    folder: Path,
    plan: str | None,
    options: Mapping[str, Any],
    model: str = "llama",
    stop: int = 0,
    resume: bool = False,
) -> Logs:
    """The logs of a training on one rank, whose model is saved in the folder."""
    made = trainer(folder, plan, options, model, callbacks=[Stop(stop)] if stop else [])
    made.train(resume_from_checkpoint=resume)
    made.save_model(str(folder / "model"))
    return logs_of(made)


def predicted(rank: int, folder: Path, plan: str | None) -> tuple[Any, Any, Any]:
    """The predictions, labels and metrics of a dataset, before training."""
    made = trainer(folder, plan)
    found = made.predict(Rows(6, seed=2))
    return found.predictions, found.label_ids, found.metrics["test_loss"]
