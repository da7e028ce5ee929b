"""Names are data: a module, a parameter, a buffer or an argument may be called anything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from superscaler_core.plans import PLANS

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
ODD = ("head one", "it's", 'a "b"', "a\\b", "a\nprint('run')\n#", '"""', "{x0}", "class", "\ufb01",
       "fi", "next", "stage0_segment0", "run", "TABLES", "x" * 130, "e\u0301")  # fmt: skip


class Odd(nn.Module):
    """A model whose modules, parameters and buffers have odd names."""

    def __init__(self) -> None:
        super().__init__()
        self.lines = nn.ModuleDict({name: nn.Linear(6, 6) for name in ODD})
        for name in ODD:
            self.lines[name].register_parameter(name, nn.Parameter(torch.ones(6)))
            self.lines[name].register_buffer(name * 2, torch.ones(6))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for name in ODD:
            line = self.lines[name]
            x = (line(x) * getattr(line, name)).tanh() + getattr(line, name * 2).mul_(0.9)
        return (x**2).mean()


class Shared(nn.Module):
    """A model whose arguments, ops, parameters and buffers have the same names."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.mask = nn.Parameter(torch.arange(6.0))
        self.register_buffer("scale", torch.full((6,), 2.0))
        self.register_buffer("mean", torch.ones(6))
        self.double()

    def forward(self, mask: Tensor, scale: Tensor) -> Tensor:
        made = self.line(mask) * self.mask - scale * self.scale + mask.mean() - self.mean
        return (made**2).mean()


def alternating(plan: ss.Plan) -> None:
    for op in plan.graph.ops:
        plan.op_assign(op, op.index // 2 % 2)


PLANS_BY_NAME: dict[str, Callable[[ss.Plan], None]] = {
    "data_parallel": PLANS["data_parallel"],
    "zero3": PLANS["zero3"],
    "alternating": alternating,
}


def folder_of(model: nn.Module, how: str, path: Path, **kwargs: Tensor) -> Path:
    plan = ss.Plan(ss.capture(model, kwargs=kwargs), devices=range(2))
    PLANS_BY_NAME[how](plan)
    return ss.compile(plan).save(path)


@pytest.mark.parametrize("how", PLANS_BY_NAME)
def test_model_with_odd_names_trains_as_in_torch(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Odd()
    folder = folder_of(model, how, tmp_path, x=X)
    loss = model(X)
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}

    def step(trainer: ss.Trainer) -> tuple[Tensor, dict[str, Tensor | None], dict[str, Tensor]]:
        made = trainer.step(X)
        return made, {n: p.grad for n, p in trainer.named_parameters()}, trainer.state_dict()

    for found, parts, state in ss.run_threads(folder, step, range(2)).values():
        torch.testing.assert_close(found, loss.detach(), rtol=1e-12, atol=0)
        torch.testing.assert_close(state, dict(model.state_dict()), rtol=1e-12, atol=0)
        assert parts.keys() <= grads.keys()


@pytest.mark.parametrize("how", PLANS_BY_NAME)
def test_arguments_and_ops_may_have_the_names_of_weights(how: str, tmp_path: Path) -> None:
    model, other = Shared(), Shared()
    other.mean.fill_(5.0)
    folder = folder_of(model, how, tmp_path, mask=X, scale=2 * X)

    def step(trainer: ss.Trainer) -> tuple[Tensor, Tensor]:
        trainer.load_state_dict(other.state_dict())
        return trainer.step(X, 2 * X), trainer.step(scale=2 * X, mask=X)

    expected = other(X, 2 * X).detach()
    for found in ss.run_threads(folder, step, range(2)).values():
        torch.testing.assert_close(found, (expected, expected), rtol=1e-12, atol=0)
