"""Test modules that tracing cannot follow, at the top level of an importable Python module."""

import torch
from torch import Tensor, nn

WIDTH = 6


class Experts(nn.Module):
    """Experts: the sum of a row determines the row's expert; experts without rows do not run."""

    def __init__(self, num: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num, WIDTH, WIDTH, dtype=torch.float64))
        self.register_buffer("scale", torch.arange(1, num + 1, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        chosen = (x.sum(-1).abs() * 10).long() % len(self.weight)
        made = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows = (chosen == expert).nonzero()[:, 0]
            made = made.index_add(0, rows, self.scale[expert] * x[rows] @ self.weight[expert])
        return made


class Named(Experts):
    """``Experts`` with keyword arguments and a dict of results."""

    def forward(self, *, rows: Tensor, factor: float) -> dict[str, Tensor | int | None]:
        made = super().forward(rows)
        return {"rows": made * factor, "sums": made.sum(1), "none": None, "one": 1}


class Other(Experts):
    """``Experts`` under another class, which can have another annotation."""


class Model(nn.Module):
    """A model of two blocks, each a linear layer followed by experts."""

    def __init__(self, kind: type[Experts] = Experts) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({"line": nn.Linear(WIDTH, WIDTH, dtype=torch.float64), "experts": kind()})
            for _ in range(2)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer["experts"](torch.tanh(layer["line"](x)))
        return (x**2).mean()


def model_of(kind: type[Experts] = Experts) -> Model:
    """A model with the same random weights every time."""
    torch.manual_seed(0)
    return Model(kind)
