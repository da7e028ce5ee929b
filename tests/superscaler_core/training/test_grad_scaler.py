"""Scaled gradients: weights, scales and skipped updates are those of a single device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from tests.covering import covering
from tests.superscaler_core.as_torch import compiled, on_ranks

NUM_STEPS = 7
OPTIONS = {"init_scale": 64.0, "growth_interval": 2}
OVERFLOWS = (2, 3)
"""Steps in which one element of one gradient is infinite."""


class Net(nn.Module):
    """``z`` determines the gradient of ``aside``, and no other gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6, dtype=torch.float64)
        self.aside = nn.Parameter(torch.zeros(6, dtype=torch.float64))

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        return (self.line(x) ** 2).mean() + (self.aside * z).mean()


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def batch(step: int) -> tuple[Tensor, Tensor]:
    x, z = torch.randn(2, 8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    if step in OVERFLOWS:
        z[0, 0] = torch.inf
    return x, z


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    # A fused optimizer reads the scale and the overflow flag itself.
    "fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
}


def loop(
    step: Callable[..., object], scaler: Any, optimizer: Any, clip: Any = None, batches: Any = None
) -> list[float]:
    """Train; returns the scale after every step."""
    scales = []
    for inputs in batches or map(batch, range(NUM_STEPS)):
        step(*inputs)
        if clip is not None:
            scaler.unscale_(optimizer)
            clip(0.1)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    return scales


@covering(plan_name=["data_parallel", "zero1"], name=OPTIMIZERS, clipped=[False, True])
def test_scaled_training_equals_that_of_a_single_device(
    plan_name: str, name: str, clipped: bool, tmp_path: Path
) -> None:
    model = net()
    scaler = torch.amp.GradScaler("cpu", **OPTIONS)
    optimizer = OPTIMIZERS[name](model.parameters())
    scales = loop(
        lambda *batch: scaler.scale(model(*batch)).backward(), scaler, optimizer,
        (lambda norm: nn.utils.clip_grad_norm_(model.parameters(), norm)) if clipped else None,
    )  # fmt: skip
    assert len(set(scales)) > 2

    def work(trainer: ss.Trainer) -> tuple[list[float], dict[str, Tensor]]:
        optimizer = OPTIMIZERS[name](trainer.parameters())
        clip = trainer.clip_grad_norm_ if clipped else None
        found = loop(trainer.step, trainer.grad_scaler(**OPTIONS), optimizer, clip)
        return found, trainer.state_dict()

    for found, state in on_two(plan_name, work, tmp_path):
        assert found == scales
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-12, atol=1e-14)


def on_two(plan_name: str, work: Callable[[ss.Trainer], Any], folder: Path) -> list[Any]:
    return on_ranks(compiled(ss.capture(net(), batch(0)), plan_name), folder, work)


# Threads add up gradients, infinite ones too, by numpy.
@pytest.mark.filterwarnings("ignore:invalid value encountered in add:RuntimeWarning")
@pytest.mark.parametrize("plan_name", ["data_parallel", "zero1"])
def test_float16_autocast_trains_float32_weights_as_a_single_device(
    plan_name: str, tmp_path: Path
) -> None:
    options = {"init_scale": 2.0**18, "growth_interval": 3}
    batches = [tuple(t.float() for t in batch(step + 10)) for step in range(NUM_STEPS)]
    autocast = torch.autocast("cpu", torch.float16)
    model = net().float()
    with autocast:
        program = compiled(ss.capture(model, batches[0]), plan_name)

    def work(trainer: ss.Trainer) -> tuple[list[float], dict[str, Tensor]]:
        optimizer = torch.optim.SGD(trainer.parameters(), lr=0.1)
        scaler = trainer.grad_scaler(**options)
        scales = loop(trainer.step, scaler, optimizer, batches=batches)
        return scales, trainer.state_dict()

    found = on_ranks(program, tmp_path, work)
    scaler = torch.amp.GradScaler("cpu", **options)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    def step(*inputs: Tensor) -> None:
        with autocast:
            loss = model(*inputs)
        scaler.scale(loss).backward()

    scales = loop(step, scaler, optimizer, batches=batches)
    assert scales[0] < options["init_scale"]  # float16 overflows at first
    for mine, state in found:
        assert mine == scales
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-2, atol=1e-3)


def test_loss_is_not_scaled_and_a_disabled_scaler_has_no_effect(tmp_path: Path) -> None:
    def work(trainer: ss.Trainer) -> list[tuple[Tensor, Tensor | None]]:
        found = []
        for options in ({"enabled": False}, OPTIONS):
            trainer.grad_scaler(**options)
            weight = dict(trainer.named_parameters())["line.weight"]
            weight.grad = None
            found.append((trainer.step(*batch(0)), weight.grad))
        return found

    for (loss, grad), (again, scaled) in on_two("data_parallel", work, tmp_path):
        assert torch.equal(loss, again)
        torch.testing.assert_close(grad * 64, scaled)


def test_grad_scaler_with_updates_inside_a_step_raises_plan_error(tmp_path: Path) -> None:
    def work(trainer: ss.Trainer) -> None:
        trainer.grad_scaler()
        with pytest.raises(ss.PlanError, match="cannot skip an update whose scaled gradients"):
            trainer.update_with(torch.optim.SGD)

    on_two("zero1", work, tmp_path)


@covering(plan_name=["data_parallel", "zero1"], given=[1.0, 2.0, 3.0, torch.inf], limit=[0.1, 1e3])
def test_gradients_are_clipped_by_any_norm(
    plan_name: str, given: float, limit: float, tmp_path: Path
) -> None:
    model = net()
    model(*batch(0)).backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit, given)

    def work(trainer: ss.Trainer) -> tuple[Tensor, dict[str, Tensor]]:
        trainer.step(*batch(0))
        found = trainer.clip_grad_norm_(limit, given)
        torch.optim.SGD(trainer.parameters(), lr=1.0).step()
        return found, trainer.state_dict()

    expected = {n: (p - p.grad).detach() for n, p in model.named_parameters() if p.grad is not None}
    for found, state in on_two(plan_name, work, tmp_path):
        torch.testing.assert_close(found, norm, rtol=1e-12, atol=0)
        torch.testing.assert_close(state, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("plan_name", ["data_parallel", "zero1"])
def test_error_if_nonfinite_raises_on_all_ranks(plan_name: str, tmp_path: Path) -> None:
    def work(trainer: ss.Trainer) -> Tensor:
        trainer.step(*batch(OVERFLOWS[0]))
        with pytest.raises(RuntimeError, match=r"the norm of order 2.0 of all gradients is inf"):
            trainer.clip_grad_norm_(1.0, error_if_nonfinite=True)
        with pytest.raises(ValueError, match="a norm_type above zero, got 0"):
            trainer.clip_grad_norm_(1.0, 0)
        return trainer.clip_grad_norm_(1.0)

    assert on_two(plan_name, work, tmp_path) == [torch.inf] * 2
