"""Training: the same few steps with a program and on a single device."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor, nn

from superscaler_core.cli.sources import MadeModel
from superscaler_core.compiled import compile
from superscaler_core.front_end.model_call import loss_of
from superscaler_core.models.recycling import last_pass
from superscaler_core.parallel.homes import on_one_device
from superscaler_core.plan import Plan
from superscaler_core.schedules import nf1b, on_one_worker
from superscaler_core.training.load import run_threads
from superscaler_core.training.trainer import Trainer

State = Mapping[str, Tensor]
"""Whole parameters by their single-device names."""

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "momentum": partial(torch.optim.SGD, momentum=0.9),
    # With a large eps, gradients that are zero up to rounding do not decide the comparison.
    "adam": partial(torch.optim.Adam, eps=1e-3),
    "adamw": partial(torch.optim.AdamW, eps=1e-3),
}
"""Optimizers, by the names in ``memory.STATES``."""


@dataclass(frozen=True)
class Training:
    """A training with one of ``OPTIMIZERS`` from whole parameters, with one batch for all steps."""

    state: State
    batch: Mapping[str, Tensor]
    num_steps: int
    optimizer: str
    lr: float

    def to(self, device: torch.device) -> Training:
        """The same training, with its batch on a device."""
        return replace(self, batch={name: x.to(device) for name, x in self.batch.items()})

    def __call__(self, trains: Trainer | Eager) -> TrainingResult:
        """Train."""
        trains.load_state_dict(self.state)
        make = partial(OPTIMIZERS[self.optimizer], lr=self.lr)
        optimizers = []
        if isinstance(trains, Trainer) and trains.is_asynchronous:
            trains.update_with(make)
        else:
            optimizers.append(make(trains.parameters()))
        losses = []
        for _ in range(self.num_steps):
            losses.append(trains.step(**self.batch).item())
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        state = {name: t.detach().cpu().clone() for name, t in trains.state_dict().items()}
        return TrainingResult(tuple(losses), state)


@dataclass(frozen=True)
class TrainingResult:
    """The result of a training: the loss of every step, and whole parameters after the last."""

    losses: tuple[float, ...]
    state: State

    def difference(self, other: TrainingResult) -> tuple[float, float, str]:
        """The differences of losses and of parameters, and the parameter that differs most.

        Losses are compared relative to the loss, parameters relative to the largest number in all
        parameters, because a parameter that is zero up to rounding has no scale of its own.
        """
        losses = torch.tensor([self.losses, other.losses], dtype=torch.float64)
        scale = max(float(t.abs().max()) for t in self.state.values() if t.numel())
        off = {
            name: _or_inf(float((other.state[name].to(t) - t).abs().max()) / max(scale, 1e-30))
            for name, t in self.state.items()
            if t.numel()
        }
        worst = max(off, key=off.__getitem__)
        relative = (losses[1] - losses[0]).abs() / losses[0].abs().clamp_min(1e-30)
        return _or_inf(float(relative.max())), off[worst], worst


def _or_inf(number: float) -> float:
    """The number, or infinity if it is NaN."""
    return math.inf if math.isnan(number) else number


# --- on a single device -------------------------------------------------------------------------


@dataclass
class Eager:
    """The eager model, with gradient accumulation over the microbatches of a plan.

    ``recycled`` has the names of recycled inputs, as in ``models.Model``.
    """

    made: MadeModel
    plan: Plan
    recycled: Mapping[str, int]

    def step(self, **batch: Tensor) -> Tensor:
        """Run forward and backward of every microbatch."""
        num, total = self.plan.num_microbatches, torch.zeros(())
        device = next(iter(batch.values())).device
        first = {
            t.name: torch.zeros(t.shape, dtype=getattr(torch, t.dtype), device=device)
            for t in self.plan.graph.recycled
        }
        parts = (x.chunk(num) if x.shape else [x] * num for x in batch.values())
        for inputs in zip(*parts, strict=True):
            loss = self._loss({**dict(zip(batch, inputs, strict=True)), **first}) / num
            torch.autograd.backward(loss)
            total = total + loss.detach()
        return total

    def _loss(self, inputs: Mapping[str, Tensor]) -> Tensor:
        # The first inputs of a graph are the arguments by position.
        names = [t.name for t in self.plan.graph.inputs]
        args = [inputs[name] for name in names[: len(self.made.args)]]
        kwargs = {**self.made.kwargs, **{n: inputs[n] for n in names[len(self.made.args) :]}}
        if self.recycled:
            return last_pass(self.made.model, args, self.recycled, _num_passes_of(self.plan))
        return loss_of(self.made.model, self.made.model(*args, **kwargs))

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of the model."""
        return self.made.model.parameters()

    def load_state_dict(self, state: State) -> object:
        """Load parameters into the model."""
        return self.made.model.load_state_dict(state)

    def state_dict(self) -> State:
        """The parameters of the model, without buffers."""
        state = self.made.model.state_dict()
        return {name: state[name] for name in self.plan.graph.parameters}


def on_single_device(
    training: Training,
    made: MadeModel,
    plan: Plan,
    recycled: Mapping[str, int],
    *,
    seed: int = 0,
    master_dtype: torch.dtype | None = None,
) -> tuple[TrainingResult, str]:
    """Train on one device; also return a description of what was trained.

    This is the eager model. If its random numbers differ from those of a program, or parameters
    are stored in another dtype, or weights are updated between microbatches, it is a program of one
    device instead.
    """
    graph = plan.graph
    is_random = any("{seed}" in op.code for op in graph.ops)
    is_asynchronous = plan.schedule is not None and plan.schedule.weights is not None
    if not is_random and master_dtype is None and not is_asynchronous:
        return training(Eager(made, plan, recycled)), "the eager model"
    single = on_one_device(graph)
    if plan.schedule is not None and is_asynchronous:
        single.pipeline([stage.ops[0] for stage in plan.stages[1:]])
        single.op_order(on_one_worker(plan.schedule))
    else:
        single.op_order(nf1b(1, plan.num_microbatches, _num_passes_of(plan)))
    with tempfile.TemporaryDirectory() as folder:
        compile(single).save(folder)
        results = run_threads(folder, training, range(1), seed=seed, dtype=master_dtype)
    return results[0], "a program of one device"


def _num_passes_of(plan: Plan) -> int:
    """Number of forwards without gradient of every microbatch."""
    return plan.num_recycling_passes // plan.num_microbatches
