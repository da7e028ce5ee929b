"""A model under a plan trains as in torch: the same losses, and the same state after them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.plans import PLANS, fill

T = TypeVar("T")
Trained = tuple[list[float], dict[str, Tensor]]
"""The losses of some steps, and the state after them."""


def by_features(plan: ss.Plan) -> None:
    """Split every op along its last splittable loop, and replicate ops without one."""
    for op in plan.graph.ops:
        loops = [i for i, size in op.sizes.items() if op.is_splittable(i) and size % 2 == 0]
        how = ss.split(loops[-1], 2) if loops else ss.replicate(2)
        plan.op_assign(plan.op_trans(op, how), plan.devices)


def alternating(plan: ss.Plan) -> None:
    """Ops by turns on one device and the other."""
    for op in plan.graph.ops:
        plan.op_assign(op, op.index // 2 % len(plan.devices))


HOW: dict[str, Callable[[ss.Plan], None]] = {
    "data_parallel": PLANS["data_parallel"], "zero3": PLANS["zero3"],
    "by features": by_features, "alternating": alternating,
}  # fmt: skip


def compiled(graph: ss.Graph, how: str, num_devices: int = 2, **options: Any) -> ss.Compiled:
    """A graph under a plan of ``HOW`` or of ``PLANS``."""
    plan = ss.Plan(graph, devices=range(num_devices))
    fill(plan, HOW.get(how) or PLANS[how], options)
    return ss.compile(plan)


def given(batch: Any) -> tuple[Tensor, ...]:
    """The arguments of a step with a batch of one tensor, or of several."""
    return batch if isinstance(batch, tuple) else (batch,)


def on_ranks(
    program: ss.Compiled, folder: Path, work: Callable[[ss.Trainer], T], **how: Any
) -> list[T]:
    """Save a program and run ``work`` on each of its ranks, which are threads."""
    return [*ss.run_threads(program.save(folder, **how), work, program.plan.devices).values()]


def train(
    step: Callable[..., Tensor], parameters: Iterable[Tensor], batches: Sequence[Any]
) -> list[float]:
    """The losses of one step per batch; ``step`` computes the loss and adds the gradients."""
    # A device may store no parameter.
    optimizer = torch.optim.SGD([*parameters, torch.zeros(())], lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        losses.append(step(*given(batch)).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def in_torch(model: nn.Module, batches: Sequence[Any], num_microbatches: int = 1) -> Trained:
    """Training on one device; changes the model."""

    def step(*batch: Tensor) -> Tensor:
        total = torch.zeros((), dtype=torch.float64)
        for part in zip(*(x.chunk(num_microbatches) for x in batch), strict=True):
            loss = model(*part) / num_microbatches
            loss.backward()
            total += loss.detach()
        return total

    return train(step, model.parameters(), batches), dict(model.state_dict())


def in_program(trainer: ss.Trainer | ss.Parallel, batches: Sequence[Any]) -> Trained:
    """Training by a rank of a program."""
    return train(trainer.step, trainer.parameters(), batches), trainer.state_dict()


def check_as_in_torch(
    model: nn.Module, batches: Sequence[Any], how: str, folder: Path, num_devices: int = 2
) -> None:
    """Train a model under a plan; the same steps of torch have the same losses and state."""
    graph = ss.capture(model, given(batches[0]))
    check_program(compiled(graph, how, num_devices), model, batches, folder)


def check_program(
    program: ss.Compiled, model: nn.Module, batches: Sequence[Any], folder: Path
) -> None:
    """The same for a program of the model, which has the weights of the model."""
    found = on_ranks(program, folder, lambda trainer: in_program(trainer, batches))
    expected = in_torch(model, batches, program.plan.num_microbatches)
    for one in found:
        torch.testing.assert_close(one, expected, rtol=1e-9, atol=1e-12)
