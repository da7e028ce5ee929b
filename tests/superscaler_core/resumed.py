"""A training run that tests interrupt and resume.

It has parameter groups, a learning rate scheduler, dropout and gradient accumulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import nn

import superscaler_core as ss
from tests.superscaler_core.cases import Case

GPT = {"layers": 2, "width": 8, "heads": 2, "vocabulary": 12, "sequence": 4, "dropout": 0.1}

CASES = {
    "accumulate": Case("accumulate", 2, {"microbatches": 2}, sizes=GPT),
    "pipeline": Case("one_f_one_b", 2, {"microbatches": 2}, sizes=GPT),
    "tensor": Case("hybrid", 2, {"tp": 2, "microbatches": 2}, sizes=GPT),
    "zero1": Case("hybrid", 4, {"tp": 2, "microbatches": 2, "zero": 1}, sizes=GPT),
    "hybrid": Case("hybrid", 4, {"tp": 2, "pp": 2, "microbatches": 2}, sizes=GPT),
    "three": Case("hybrid", 3, {"microbatches": 2, "zero": 1}, sizes=GPT),
}
"""Plans of one model on 2 to 4 devices; all have two microbatches, so that dropout is equal."""

ACCUMULATED = 2
"""Steps of the trainer per step of the optimizer."""


def grouped(named: Iterable[tuple[str, nn.Parameter]]) -> list[dict[str, object]]:
    """Two parameter groups: weights with weight decay, all other parameters without."""
    parameters = list(named)
    return [
        {"params": [p for n, p in parameters if n.endswith("weight")], "weight_decay": 0.1},
        {"params": [p for n, p in parameters if not n.endswith("weight")], "weight_decay": 0.0},
    ]


@dataclass
class Resumable:
    """The training of one rank.

    Attributes:
        trainer: trainer of the rank.
        case: makes the inputs.
        seed_of: function that maps the number of a step to the seed of its inputs.
        step: number of the next step.
        losses: losses of all steps of this object, by the number of the step.
    """

    trainer: ss.Trainer
    case: Case
    seed_of: Callable[[int], int] = lambda step: step
    step: int = 0
    losses: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        groups = grouped(self.trainer.named_parameters())
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-3)
        warm = torch.optim.lr_scheduler.LinearLR(self.optimizer, 0.1, total_iters=3)
        falling = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [4, 6], gamma=0.5)
        self.scheduler = torch.optim.lr_scheduler.SequentialLR(self.optimizer, [warm, falling], [3])

    def train(self, num_steps: int) -> dict[int, float]:
        """Make ``num_steps`` steps; returns the losses of all steps of this object."""
        for _ in range(num_steps):
            total = 0.0
            for part in range(ACCUMULATED):
                seed = ACCUMULATED * self.seed_of(self.step) + part
                inputs = self.case.inputs(seed, self.trainer.num_microbatches)
                total += self.trainer.step(*inputs).item()
            self.trainer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.scheduler.step()
            self.losses[self.step] = total
            self.step += 1
        return self.losses

    def save(self, folder: Path, **options: str) -> None:
        """Save the complete state of the run."""
        self.trainer.save(
            folder, optimizer=self.optimizer, scheduler=self.scheduler, step=self.step,
            extra={"name": self.case.plan}, **options,
        )  # fmt: skip

    def load(self, folder: Path) -> None:
        """Resume from a saved folder."""
        saved = self.trainer.load(folder, optimizer=self.optimizer, scheduler=self.scheduler)
        assert saved.step is not None
        self.step = saved.step


def same_losses(found: dict[int, float], expected: dict[int, float]) -> bool:
    """Assert that losses equal the expected losses of the same steps; False without any losses."""
    steps = sorted(found)
    a, b = (torch.tensor([x[s] for s in steps], dtype=torch.float64) for x in (found, expected))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    return len(steps) > 0
