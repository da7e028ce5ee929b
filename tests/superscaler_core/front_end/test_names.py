"""Names are data: a module, a parameter, a buffer or an argument may be called anything."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import superscaler_core as ss
from tests.superscaler_core.as_torch import check_as_in_torch, compiled, on_ranks

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


WAYS = ["data_parallel", "zero3", "alternating"]


@pytest.mark.parametrize("how", WAYS)
def test_model_with_odd_names_trains_as_in_torch(how: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    check_as_in_torch(Odd(), [X] * 2, how, tmp_path)


@pytest.mark.parametrize("how", WAYS)
def test_arguments_and_ops_may_have_the_names_of_weights(how: str, tmp_path: Path) -> None:
    model, other = Shared(), Shared()
    other.mean.fill_(5.0)
    program = compiled(ss.capture(model, kwargs={"mask": X, "scale": 2 * X}), how)

    def step(trainer: ss.Trainer) -> tuple[Tensor, Tensor]:
        trainer.load_state_dict(other.state_dict())
        return trainer.step(X, 2 * X), trainer.step(scale=2 * X, mask=X)

    expected = other(X, 2 * X).detach()
    for found in on_ranks(program, tmp_path, step):
        torch.testing.assert_close(found, (expected, expected), rtol=1e-12, atol=0)
