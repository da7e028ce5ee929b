"""Modules that tracing cannot follow, for tests: at the top of a module that can be imported."""

import torch
from torch import Tensor, nn

WIDTH = 6


class Experts(nn.Module):
    """Each row goes to the expert that its sum chooses; only experts that are hit run."""

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
    """The same, with arguments and results by name."""

    def forward(self, *, rows: Tensor, factor: float) -> dict[str, Tensor | int | None]:
        made = super().forward(rows)
        return {"rows": made * factor, "sums": made.sum(1), "none": None, "one": 1}


class Other(Experts):
    """Experts of another class, for another annotation."""


class Model(nn.Module):
    """Two blocks with experts behind a linear layer."""

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
    """The same weights every time."""
    torch.manual_seed(0)
    return Model(kind)
