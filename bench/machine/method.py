"""Training methods that are compared: their steps, losses, and the time of the slowest rank.

All functions are collective over the world.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from superscaler_core import Trainer
from superscaler_core.compiled import Compiled
from superscaler_core.run import DistCall, DistTransport
from superscaler_core.training.load import load

TIMEOUT = timedelta(seconds=600)
"""Timeout of a process group."""

LOSS_TOLERANCE = 1e-5
"""Relative tolerance of losses: methods sum float32 values in different orders."""

LEARNING_RATE, MOMENTUM = 0.01, 0.9
"""With ten times this rate, the loss of a Wide-ResNet rises and rounding errors grow quickly."""


@dataclass(frozen=True)
class Method:
    """A way to train: a step (forward, backward), and the optimizer of this rank's parameters."""

    step: Callable[..., Tensor | None]
    optimizer: torch.optim.Optimizer

    @classmethod
    def of(
        cls,
        step: Callable[..., Tensor | None],
        parameters: Iterable[nn.Parameter],
    ) -> Method:
        """A method with SGD with momentum, in one kernel where torch has one: not for DTensors.

        Args:
            step: the step of this rank.
            parameters: parameters of this rank. There may be none, for example where whole ops are
                placed on devices.
        """
        stored = list(parameters) or [torch.zeros(0, requires_grad=True)]
        fused = not any(isinstance(parameter, DTensor) for parameter in stored)
        sgd = torch.optim.SGD(stored, lr=LEARNING_RATE, momentum=MOMENTUM, fused=fused)
        return cls(step, sgd)

    @classmethod
    def of_trainer(cls, trainer: Trainer) -> Method:
        """The method of this rank's part of one of our programs."""
        return cls.of(trainer.step, trainer.parameters())

    def train(self, batch: Sequence[Tensor]) -> tuple[Tensor | None, float, float]:
        """Run a step; return the loss (None if on another rank), and seconds of step and update."""
        start = time.perf_counter()
        loss = self.step(*batch)
        middle = time.perf_counter()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss, middle - start, time.perf_counter() - middle


def everyone(value: Any) -> list[Any]:
    """The values of all ranks, by rank."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


def shared(mine: Any) -> Any:
    """The first rank's value."""
    values = [mine]
    dist.broadcast_object_list(values)
    return values[0]


def loaded(program: Compiled, model: nn.Module, folder: Path) -> Trainer:
    """Load this rank's part of a program with a model's values; the first rank writes the files."""
    path = shared(folder)
    if dist.get_rank() == 0:
        program.save(path)
    dist.barrier()
    trainer = load(path)
    trainer.load_state_dict(model.state_dict())
    dist.barrier()
    return trainer


@dataclass(frozen=True)
class StepSecs:
    """The time of a step with its update, in seconds.

    Attributes:
        step: wall time of the slowest rank.
        cpu: processor time, mean of the ranks.
    """

    step: float
    cpu: float


def timed(method: Method, batch: Sequence[Tensor]) -> StepSecs:
    """Run a step and return its time, as ``seen`` does."""
    return seen(method, batch)[1]


def seen(method: Method, batch: Sequence[Tensor]) -> tuple[float, StepSecs]:
    """Run a step that all ranks begin together; return its loss and its time.

    The loss is the mean over the ranks that have one.
    """
    dist.barrier()
    start, cpu_start = time.perf_counter(), time.process_time()
    loss, _, _ = method.train(batch)
    mine = time.perf_counter() - start, time.process_time() - cpu_start
    ranks = everyone((None if loss is None else loss.item(), *mine))
    losses, steps, cpus = zip(*ranks, strict=True)
    mean_loss = fmean(one for one in losses if one is not None)
    return mean_loss, StepSecs(max(steps), fmean(cpus))


def check_losses(losses: Mapping[str, list[float]]) -> None:
    """Raise ``SystemExit`` unless the losses of all methods agree.

    Every loss except the first depends on updates, so equal losses show equal training.
    """
    (first, expected), *others = losses.items()
    for name, values in others:
        for step, (a, b) in enumerate(zip(expected, values, strict=True)):
            if not abs(a - b) <= LOSS_TOLERANCE * abs(a):
                raise SystemExit(f"step {step}: the loss of {first} is {a}, of {name} {b}.")


def slowest(method: Method, batch: tuple[Tensor, Tensor]) -> float:
    """Seconds of a step without the update, of the slowest rank."""
    dist.barrier()
    _, secs, _ = method.train(batch)
    return max(everyone(secs))


def alternating(
    methods: Mapping[str, Method], batches: Sequence[tuple[Tensor, Tensor]], num_steps: int
) -> dict[str, list[float]]:
    """Check that the losses agree; then time all methods, alternating step by step, in seconds."""
    losses = {name: [seen(method, x)[0] for x in batches] for name, method in methods.items()}
    check_losses(losses)
    samples: dict[str, list[float]] = {name: [] for name in methods}
    for i in range(num_steps):
        for name, method in methods.items():
            samples[name].append(slowest(method, batches[i % len(batches)]))
    return samples


# --- communication ------------------------------------------------------------------------------


def waiting_secs(method: Method, batches: Sequence[tuple[Tensor, Tensor]], num_steps: int) -> float:
    """Seconds per step in which a rank waits for communication, mean over ranks and steps."""
    total = 0.0
    for i in range(num_steps):
        dist.barrier()
        with _waiting() as spent:
            method.train(batches[i % len(batches)])
        total += sum(everyone(sum(spent))) / dist.get_world_size()
    return total / num_steps


@contextmanager
def _waiting() -> Iterator[list[float]]:
    """Record the seconds of all calls in the block that wait for communication."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            result = method(*args)
            spent.append(time.perf_counter() - start)
            return result

        return call

    before = DistCall.move, DistTransport._many
    setattr(DistCall, "move", timed(before[0]))  # noqa: B010 - methods, for mypy
    original = before[1]

    def many(self: DistTransport, sub_transfers: Any, tensors: Any, *, async_op: bool) -> Any:
        return timed(lambda: original(self, sub_transfers, tensors, async_op=async_op))()

    setattr(DistTransport, "_many", many)  # noqa: B010
    try:
        yield spent
    finally:
        setattr(DistCall, "move", before[0])  # noqa: B010
        setattr(DistTransport, "_many", before[1])  # noqa: B010
