"""Cells: train one family of models under one plan, and compare with training on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.plans import PLANS
from tests.models.experts import MIXTURES
from tests.models.families import FAMILIES

MODELS = {**FAMILIES, **MIXTURES}
BATCH = 4
NUM_STEPS = 2

KNOBS: Mapping[str, Mapping[int, Mapping[str, Any]]] = {
    "data_parallel": {2: {}, 4: {}},
    "zero3": {2: {}, 4: {}},
    "megatron": {2: {}, 4: {}},
    "one_f_one_b": {2: {"microbatches": 3}, 4: {"microbatches": 4}},
    "hybrid": {2: {"tp": 2, "microbatches": 2}, 4: {"tp": 2, "pp": 2, "microbatches": 2}},
    "recompute": {2: {}, 4: {}},
}
"""Options of every plan, on 2 and on 4 devices."""


@dataclass(frozen=True)
class Trained:
    """The result of a training: the loss of every step, and the change of each parameter."""

    losses: tuple[float, ...]
    changes: Mapping[str, Tensor]


def compiled(family: str, plan: str, num_devices: int) -> ss.Compiled:
    """The program of a plan for a family.

    Raises:
        PlanError: the plan does not fit the model.
    """
    made = ss.Plan(_graph(family), range(num_devices))
    PLANS[plan](made, **KNOBS[plan][num_devices])
    return ss.compile(made)


def error(family: str, program: ss.Compiled, folder: Path) -> float:
    """The largest relative difference between training on a rank and training on one device.

    The difference of a loss is divided by the loss. The difference of a parameter's change is
    divided by the largest change of the parameter's elements. This divisor is at least a thousandth
    of the largest change of all parameters, because smaller changes are rounding noise.
    """
    num_microbatches = program.plan.num_microbatches
    program.save(folder)
    found = ss.run_threads(
        folder, lambda trainer: _train(family, trainer), range(len(program.plan.devices))
    )
    alone = _alone(family, num_microbatches)
    floor = 1e-3 * max(change.abs().max() for change in alone.changes.values())
    errors = [torch.zeros(())]
    for one in found.values():
        assert one.changes.keys() == alone.changes.keys()
        for loss, expected in zip(one.losses, alone.losses, strict=True):
            errors.append(torch.tensor(abs(loss - expected) / abs(expected)))
        for name, expected in alone.changes.items():
            difference = (one.changes[name] - expected).abs().max()
            errors.append(difference / expected.abs().max().clamp_min(floor))
    # ``Tensor.max`` returns NaN if an element is NaN; the builtin ``max`` may not.
    return torch.stack([e.double() for e in errors]).max().item()


@cache
def _graph(family: str) -> ss.Graph:
    """The captured model; captured once for all plans, because plans do not change it."""
    made = MODELS[family]
    kwargs = {**made.batch(BATCH, 0), **made.options}
    return ss.capture(made.model(), kwargs=kwargs)


def _batch(family: str, num_microbatches: int, step: int) -> dict[str, Tensor]:
    return MODELS[family].batch(BATCH * num_microbatches, 1 + step)


def _train(family: str, trainer: ss.Trainer) -> Trained:
    start = {name: value.clone() for name, value in trainer.state_dict().items()}
    optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        losses.append(trainer.step(**_batch(family, trainer.num_microbatches, step)).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(tuple(losses), _changes(start, trainer.state_dict()))


@cache
def _alone(family: str, num_microbatches: int) -> Trained:
    made = MODELS[family]
    model: nn.Module = made.model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(NUM_STEPS):
        batch = _batch(family, num_microbatches, step)
        chunks = {name: value.chunk(num_microbatches) for name, value in batch.items()}
        total = 0.0
        for i in range(num_microbatches):
            output = model(**{name: parts[i] for name, parts in chunks.items()}, **made.options)
            loss = output.loss / num_microbatches
            loss.backward()
            total += loss.item()
        losses.append(total)
        optimizer.step()
        optimizer.zero_grad()
    return Trained(tuple(losses), _changes(start, model.state_dict()))


def _changes(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: (end[name] - start[name]).double() for name in start}
