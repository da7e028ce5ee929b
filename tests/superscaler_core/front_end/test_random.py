"""Random ops of a forward draw the same numbers under every plan, and other ones in each step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, nn
from torch import distributions as dist

import superscaler_core as ss
from tests.superscaler_core.as_torch import HOW, compiled, in_program, on_ranks

X = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "bernoulli_": lambda h: torch.empty_like(h).bernoulli_(),
    "bernoulli_ of a tensor": lambda h: torch.empty_like(h).bernoulli_(h.sigmoid()),
    "alpha dropout": nn.AlphaDropout(),
    "feature alpha dropout": lambda h: nn.FeatureAlphaDropout()(h[None])[0],
    "rrelu": nn.RReLU(),
    "randint": lambda h: torch.randint(3, 10, (8, 1)),
    "randint_like": lambda h: torch.randint_like(h, 5),
    "random_": lambda h: torch.empty_like(h).random_(2, 5) + torch.empty(6).int().random_() % 3,
    "randperm": lambda h: h[torch.randperm(8)],
    "mixup": lambda h: h.lerp(h[torch.randperm(8)], dist.Beta(0.4, 0.4).sample().double()),
    "multinomial": lambda h: torch.multinomial(h.softmax(-1), 6) + torch.multinomial(h[0].exp(), 1),
    "multinomial with replacement": lambda h: torch.multinomial(h.softmax(-1), 9, True)[:, :6],
    "poisson": lambda h: torch.poisson(h.exp()),
    "binomial": lambda h: torch.binomial(torch.full_like(h, 9), h.sigmoid()),
    "normal": lambda h: torch.normal(h, 1.0) + torch.normal(0.0, h.exp()) + torch.normal(h, h**2),
    "others": lambda h: (
        torch.empty_like(h).log_normal_() + torch.empty_like(h).geometric_(0.3)
        + torch.empty_like(h).cauchy_().tanh()
    ),
    "Normal": lambda h: dist.Normal(h, 1.0).rsample(),
    "Categorical": lambda h: dist.Categorical(logits=h).sample()[:, None],
    "Bernoulli": lambda h: dist.Bernoulli(logits=h).sample(),
    "Gamma": lambda h: dist.Gamma(h.exp(), 2.0).rsample(),
    "Dirichlet": lambda h: dist.Dirichlet(h.exp()).rsample(),
    "StudentT": lambda h: dist.StudentT(h.exp() + 3).rsample(),
    "Laplace": lambda h: dist.Laplace(h, 1.0).rsample(),
    "Poisson": lambda h: dist.Poisson(h.exp()).sample(),
    "Geometric": lambda h: dist.Geometric(logits=h).sample(),
    "gumbel softmax": lambda h: F.gumbel_softmax(h, hard=True),
}  # fmt: skip


class Random(nn.Module):
    """A model that adds draws to what it computes."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names = names
        self.lines = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in names)

    def forward(self, x: Tensor) -> Tensor:
        for name, line in zip(self.names, self.lines, strict=True):
            h = line(x).tanh()
            x = x + h * DRAWS[name](h)
        return (x**2).mean()


def trained(graph: ss.Graph, how: str, folder: Path, num_devices: int = 2) -> object:
    program = compiled(graph, how, num_devices)
    first, *others = on_ranks(program, folder, lambda trainer: in_program(trainer, [X] * 2))
    for found in others:
        torch.testing.assert_close(found, first, rtol=0, atol=0)
    return first


@pytest.mark.filterwarnings("ignore::superscaler_core.OpaqueWarning")
@pytest.mark.parametrize("names", [[*DRAWS][i::3] for i in range(3)], ids=", ".join)
def test_every_plan_draws_the_numbers_of_one_device(names: list[str], tmp_path: Path) -> None:
    graph = ss.capture(Random([*names, names[0]]), (X,))
    assert not graph.opaque
    expected = trained(graph, "alternating", tmp_path / "alone", num_devices=1)
    for how in HOW:
        found = trained(graph, how, tmp_path / how)
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)


def test_every_step_and_microbatch_draws_other_numbers(tmp_path: Path) -> None:
    """A model whose loss is a draw."""

    class Draw(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.randint(1 << 40, (1,)).double().sum() + 0 * x.sum()

    program = compiled(ss.capture(Draw(), (X,)), "alternating", num_devices=1)

    def draw(trainer: ss.Trainer) -> list[float]:
        return [trainer.step(X).item() for _ in range(5)]

    (found,) = on_ranks(program, tmp_path, draw)
    assert len(set(found)) == 5


@pytest.mark.parametrize(
    "draw",
    [
        lambda h, g: torch.rand(8, 6, generator=g),
        lambda h, g: torch.empty_like(h).normal_(generator=g),
        lambda h, g: torch.bernoulli(h.sigmoid(), generator=g),
    ],
)
def test_generator_of_the_model_is_refused_by_name(
    draw: Callable[[Tensor, torch.Generator], Tensor],
) -> None:
    model = Random(["randint"])
    model.forward = lambda x: (model.lines[0](x) * draw(x, torch.Generator())).sum()
    with pytest.raises(ss.CaptureError, match=r"torch.Generator of its own.* leave generator= out"):
        ss.capture(model, (X,))
