"""Training in tests: a few steps of a program, compared with the same steps of plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.materialize import schedule_of
from superscaler_core.models import MODELS, build, example_inputs, last_pass
from superscaler_core.plan import NO_OVERLAP
from superscaler_core.plans import PLANS, fill, stages_of_blocks
from superscaler_core.schedules import recompute_apart, split_backward
from tests.superscaler_core.schedule_rows import round_robin


def _sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def _adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    # Some gradients, for example of a key's bias, are zero in exact arithmetic. In floating-point
    # arithmetic, they are rounding noise. Adam divides a gradient by its size, so only an eps far
    # above the noise keeps the updates small.
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def _plain(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": _sgd, "adamw": _adamw, "plain": _plain
}  # fmt: skip


def _mixed(schedule: ss.Schedule) -> ss.Schedule:
    """The schedule with split backwards for microbatches 0, 2, 4, ... only."""
    whole = str(schedule).split()
    row = [
        f"{word.replace('B', 'I')} {word.replace('B', 'W')}"
        if "B" in word and int(word.partition("B")[2]) % 2 == 0
        else word
        for word in whole[3:]
    ]
    text = " ".join([*whole[:3], *row]).replace(" worker", "\nworker")
    return ss.Schedule.parse(text)


REWRITES: dict[str, Callable[[ss.Schedule], ss.Schedule]] = {
    "halves": split_backward,
    "late": lambda schedule: split_backward(schedule, 2),
    "apart": recompute_apart,
    "mixed": _mixed,
    "halves-apart": lambda schedule: split_backward(recompute_apart(schedule)),
}
"""Rewrites of a plan's schedule, by name.

"halves" splits backwards into I and W, and "late" delays each W by two microbatches. "apart" makes
recomputations actions of the schedule. "halves-apart" applies "apart" and then "halves". "mixed"
splits the backwards of every second microbatch.
"""


EVOFORMER_PLANS = ("dap", "dap_pipeline", "branch_parallel", "nf1b")

FOLDED = ("interleaved", "zero_bubble_v", "dualpipe_v")
"""Plans with two stages per device."""
ASYNCHRONOUS = ("pipedream", "pipedream_2bw", "ampnet", "pipemare")
"""Plans that update weights between microbatches; ``delayed.py`` trains them."""

MODEL_OF = {"expert_parallel": "moe", **dict.fromkeys(EVOFORMER_PLANS, "evoformer"),
            "interlaced": "mbart", "terapipe": "gpt", "spatial": "wide_resnet"}  # fmt: skip
"""The model of each plan that works for only one kind of model."""


@dataclass(frozen=True)
class Case:
    """A plan on a number of devices, and the model that it trains.

    Attributes:
        plan: a name of ``PLANS``.
        num_devices: number of ranks of the program.
        options: options of the plan.
        model: a name of ``MODELS``.
        sizes: sizes of the model that differ from ``tiny``.
        optimizer: a name of ``OPTIMIZERS``.
        dtype: dtype of the parameters.
        batch: samples per microbatch.
        num_steps: number of training steps.
        overlap: communication that runs while ranks compute.
        rewrite: rewrite of the schedule, a name of ``REWRITES``; none if empty.
    """

    plan: str
    num_devices: int
    options: Mapping[str, Any] = field(default_factory=dict)
    model: str = "gpt"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    optimizer: str = "sgd"
    dtype: str = "float64"
    batch: int = 4
    num_steps: int = 2
    overlap: ss.Overlap = NO_OVERLAP
    rewrite: str = ""

    def __str__(self) -> str:
        said = {**self.options, **self.sizes}
        words = [f"{name}={getattr(value, '__name__', value)}" for name, value in said.items()]
        words += ["overlap"] if self.overlap else []
        words += [self.rewrite] if self.rewrite else []
        what = [self.plan, self.num_devices, self.model, *words, self.optimizer, self.dtype]
        return "-".join(map(str, what))

    def new_model(self) -> nn.Module:
        """The model, with the same random weights every time."""
        torch.manual_seed(0)
        return build(self.model, **self.sizes).to(getattr(torch, self.dtype))

    def inputs(self, seed: int, num_microbatches: int = 1) -> tuple[Tensor, ...]:
        """The arguments of one step; recycled arguments come last."""
        batch = self.batch * num_microbatches
        made = example_inputs(self.model, batch, seed=seed, **self.sizes)
        dtype = getattr(torch, self.dtype)
        return tuple(x.to(dtype) if x.is_floating_point() else x for x in made)

    @property
    def recycle(self) -> int:
        """Number of forwards without gradient, per microbatch, before the forward with gradient."""
        options = signature(PLANS[self.plan]).parameters if self.plan in PLANS else {}
        return self.options.get(
            "recycle", options["recycle"].default if "recycle" in options else 0
        )

    @property
    def recycled(self) -> Mapping[str, int]:
        """Recycled inputs; they are the last inputs of a model, and are not passed to a program."""
        return MODELS[self.model].recycled

    def compiled(self) -> ss.Compiled:
        """The compiled program."""
        return ss.compile(self.planned())

    def planned(self) -> ss.Plan:
        """The plan, filled by ``PLANS[plan]``, with the overlap and the rewrite of the schedule."""
        plan = ss.Plan(self._graph(), range(self.num_devices))
        fill(plan, PLANS[self.plan], self.options)
        plan.overlap = self.overlap
        if self.rewrite:
            plan.op_order(REWRITES[self.rewrite](schedule_of(plan)), plan.placement)
        return plan

    def _graph(self) -> ss.Graph:
        """The captured model; captured once for all plans, because plans do not change it."""
        key = f"{self.model} {self.sizes} {self.dtype} {self.batch}"
        if key not in _graphs:
            _graphs[key] = ss.capture(self.new_model(), self.inputs(0), recycled=self.recycled)
        return _graphs[key]


_graphs: dict[str, ss.Graph] = {}


@dataclass(frozen=True)
class RoundRobin(Case):
    """A case with a pipeline whose stages are replicated on several devices.

    Attributes:
        replicas: number of devices of every stage; these take microbatches in turn.
    """

    plan: str = "round_robin"
    num_devices: int = 3
    replicas: tuple[int, ...] = (2, 1)

    def __str__(self) -> str:
        return f"{super().__str__()}-{self.replicas}"

    def planned(self) -> ss.Plan:
        plan = ss.Plan(self._graph(), range(self.num_devices))
        first = 0
        for stage in stages_of_blocks(plan, len(self.replicas)):
            for op in stage.ops:
                plan.op_assign(op, first)
            first += self.replicas[stage.index]
        schedule = round_robin(self.replicas, **self.options)
        plan.op_order(schedule, ss.Placement.even(plan.devices, schedule.num_workers))
        return plan


@dataclass(frozen=True)
class Trained:
    """The result of a training: the loss of every step, and the parameters after the last step."""

    losses: tuple[float, ...]
    parameters: Mapping[str, Tensor]


def train(trainer: ss.Trainer, case: Case, state: Mapping[str, Tensor]) -> Trained:
    """Train one rank's part of a program, from the parameters in ``state``."""
    trainer.load_state_dict(state)
    optimizer = OPTIMIZERS[case.optimizer](trainer.parameters())
    losses = []
    for step in range(case.num_steps):
        inputs = case.inputs(step, trainer.num_microbatches)
        losses.append(trainer.step(*inputs[: len(inputs) - len(case.recycled)]).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(tuple(losses), trainer.state_dict())


def train_alone(case: Case, num_microbatches: int) -> Trained:
    """Train the model on one device by plain torch, with the same microbatches and recycling."""
    model = case.new_model()
    optimizer = OPTIMIZERS[case.optimizer](model.parameters())
    losses = []
    for step in range(case.num_steps):
        chunks = [x.chunk(num_microbatches) for x in case.inputs(step, num_microbatches)]
        total = 0.0
        for microbatch in zip(*chunks, strict=True):
            loss = last_pass(model, microbatch, case.recycled, case.recycle) / num_microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(tuple(losses), model.state_dict())


def difference(trained: Trained, alone: Trained, floor: float) -> float:
    """The largest relative difference of losses and parameters.

    The largest difference of a parameter's elements is divided by the largest element. The divisor
    is at least ``floor``, because a parameter that is zero in exact arithmetic has only rounding
    noise.
    """
    assert trained.parameters.keys() == alone.parameters.keys()
    losses = [torch.tensor(one.losses, dtype=torch.float64) for one in (trained, alone)]
    pairs = [(losses[0], losses[1])]
    pairs += [(trained.parameters[name], value) for name, value in alone.parameters.items()]
    errors = [(a - b).abs().max() / b.abs().max().clamp_min(floor) for a, b in pairs]
    # ``Tensor.max`` returns NaN if an element is NaN; the builtin ``max`` may not.
    return torch.stack([error.double() for error in errors]).max().item()


def check_trains(
    case: Case, folder: Path, most: float = 1e-12, *, compiled: ss.Compiled | None = None
) -> None:
    """Train with ranks as threads; each rank differs from training alone by ``most`` at most.

    Args:
        case: the training; its plan is compiled if ``compiled`` is None.
        folder: where the program is saved.
        most: the largest ``difference``.
        compiled: a program of the case's model on the case's devices.
    """
    compiled = compiled or case.compiled()
    compiled.save(folder)
    start = case.new_model().state_dict()
    alone = train_alone(case, compiled.plan.num_microbatches)
    ranks = range(case.num_devices)
    found = ss.run_threads(folder, lambda trainer: train(trainer, case, start), ranks)
    errors = [difference(one, alone, 1e-3) for one in found.values()]
    assert [error for error in errors if not error <= most] == []
