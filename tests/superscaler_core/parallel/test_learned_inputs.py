"""Inputs of a step that require gradients get those of one device, under every plan."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from tests.superscaler_core.parallel.threads import on_threads

PLANS = {
    "data_parallel": 2, "zero3": 2, "zero3:keep=block_inputs,overlap=true": 2, "megatron": 2,
    "megatron_sp": 2, "hybrid:tp=2,microbatches=2,zero=1": 4, "accumulate:microbatches=4": 1,
    "one_f_one_b:microbatches=4": 2, "hybrid:tp=2,pp=2,microbatches=2": 4,
    "zero_bubble:pp=2,microbatches=4": 2, "coshard": 2, "recompute": 1,
}  # fmt: skip


class Net(nn.Module):
    """Reads both inputs before its first parameters, and one of them in the middle again."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 8))
            for _ in range(4)
        )

    def forward(self, x: Tensor, shift: Tensor) -> Tensor:
        h = 2 * x.sin() + shift
        for layer in self.layers:
            h = h + layer(h)
        return (h * x).square().mean()


def inputs(size: int = 8) -> dict[str, Tensor]:
    random = torch.Generator().manual_seed(size)
    x = torch.randn(size, 4, 8, generator=random, dtype=torch.float64)
    return {"x": x.requires_grad_(), "shift": torch.ones(8, dtype=torch.float64).requires_grad_()}


def net() -> Any:
    torch.manual_seed(0)
    return Net().double()


SHIFT = ss.Batch(dims={"shift": None})


@pytest.mark.parametrize("plan", PLANS)
def test_gradients_of_inputs_are_those_of_one_device(plan: str) -> None:
    """Also of one that belongs to all samples, of a smaller batch, and added to what is there."""
    alone, wanted = net(), []
    for size in (8, 8, 5):
        given = inputs(size)
        alone(**given).backward()
        wanted.append([tensor.grad for tensor in given.values()])

    def work(parallel: ss.Parallel) -> None:
        for size, want in zip((8, 8, 5), wanted, strict=True):
            given = inputs(size)
            for turn in (1, 2):
                parallel.step(**given)
                for tensor, grad in zip(given.values(), want, strict=True):
                    assert tensor.grad is not None
                    torch.testing.assert_close(tensor.grad, turn * grad, rtol=1e-10, atol=1e-14)
        for name, parameter in parallel.named_parameters():
            assert parameter.grad is not None, name

    on_threads(net(), inputs(), PLANS[plan], work, plan=plan, batch=SHIFT)


def test_gradients_go_on_into_what_computed_an_input() -> None:
    torch.manual_seed(0)
    encoder, x = nn.Linear(8, 8).double(), inputs()["x"].detach()
    shift = inputs()["shift"].detach()
    other = deepcopy(encoder)
    net()(encoder(x), shift).backward()
    parallel = ss.parallelize(
        net(), (other(x), shift), plan="accumulate:microbatches=2", batch=SHIFT
    )
    parallel.step(other(x), shift)
    for mine, want in zip(other.parameters(), encoder.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, want.grad, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("plan", ["zero3", "one_f_one_b:microbatches=2"])
def test_a_frozen_model_gives_gradients_to_inputs_alone(plan: str) -> None:
    alone, given = net().requires_grad_(False), inputs()
    alone(**given).backward()

    def work(parallel: ss.Parallel) -> None:
        mine = inputs()
        parallel.step(**mine)
        for name, tensor in given.items():
            assert mine[name].grad is not None
            torch.testing.assert_close(mine[name].grad, tensor.grad, rtol=1e-10, atol=1e-14)

    on_threads(net().requires_grad_(False), inputs(), 2, work, plan=plan, batch=SHIFT)


def test_a_whole_loss_gives_gradients_to_inputs() -> None:
    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.line = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.line(x.sin()).mean(1)

    def loss(features: Tensor) -> Tensor:
        return (features @ features.T).logsumexp(1).mean()

    torch.manual_seed(0)
    model, x, y = Features().double(), inputs()["x"], inputs()["x"]
    loss(deepcopy(model)(x)).backward()
    parallel = ss.parallelize(model, (y,), plan="accumulate:microbatches=2", whole_loss=loss)
    parallel.step(y)
    torch.testing.assert_close(y.grad, x.grad, rtol=1e-10, atol=1e-14)


def test_scales_and_samples_of_ranks() -> None:
    x, shift = inputs().values()
    parallel = ss.parallelize(net(), (x, shift), batch=SHIFT)
    with parallel.scaled(0.5):
        parallel.step(x, shift)
    half = x.grad
    x.grad = None
    parallel.step(x, shift)
    torch.testing.assert_close(half, x.grad / 2)
    x.grad = None
    parallel.evaluate(x, shift)
    assert x.grad is None
    parallel.step(x.detach(), shift)
    assert x.grad is None

    def work(local: ss.Parallel) -> None:
        with pytest.raises(ValueError, match="requires a gradient, and this step gives"):
            local.step(x=torch.randn(4, 4, 8).double().requires_grad_(), shift=shift.detach())

    given = {name: tensor.detach()[:4] for name, tensor in inputs().items()}
    given["shift"] = shift.detach()
    on_threads(net(), given, 2, work, batch=ss.Batch(dims={"shift": None}, kind="local"))
