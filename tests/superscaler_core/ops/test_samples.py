"""Samples by counter: they have their distributions, and parts draw what the whole draws."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from superscaler_core import ops

NUM = 20_000
WHERE = {"lo": (0,), "extent": (NUM,), "shape": (NUM,)}
DEVICE = {"dtype": torch.float64, "device": "cpu"}


def of(value: float) -> Tensor:
    return torch.full((NUM,), value, dtype=torch.float64)


# Draws, with their mean and their variance.
CASES: dict[str, tuple[Callable[[], Tensor], float, float]] = {
    "integers": (lambda: ops.integers(1, -3, 8, **WHERE, **DEVICE), 2, (11**2 - 1) / 12),
    **{
        f"poisson of {rate}": (
            lambda rate=rate: ops.poisson(of(rate), 2, lo=(0,), shape=(NUM,)), rate, rate
        )
        for rate in (0.3, 4.0, 1e5)
    },
    "binomial": (lambda: ops.binomial(of(7), of(0.3), 3, lo=(0,), shape=(NUM,)), 2.1, 1.47),
    **{
        f"gamma of {alpha}": (
            lambda alpha=alpha: ops.standard_gamma(of(alpha), 4, lo=(0,), shape=(NUM,)),
            alpha, alpha,
        )
        for alpha in (0.2, 1.0, 30.0)
    },
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_samples_have_the_mean_and_the_variance_of_their_distribution(name: str) -> None:
    draw, mean, variance = CASES[name]
    found = draw().double()
    # Six standard deviations of the mean; a variance is known less well where tails are long.
    assert found.mean().item() == pytest.approx(mean, abs=6 * math.sqrt(variance / NUM))
    assert found.var().item() == pytest.approx(variance, rel=0.15)


@pytest.mark.parametrize("replacement", [True, False])
def test_columns_are_drawn_as_often_as_their_weights_say(replacement: bool) -> None:
    weights = torch.tensor([0.0, 1.0, 5.0, 2.0]).expand(NUM, 4)
    found = ops.multinomial(weights, 2, replacement, 5, row=0, num_rows=NUM)
    shares = torch.bincount(found[:, 0], minlength=4) / NUM
    torch.testing.assert_close(shares, weights[0] / 8, atol=6 * 0.5 / math.sqrt(NUM), rtol=0)
    assert replacement or (found[:, 0] != found[:, 1]).all()
    assert (found > 0).all()


def test_permutation_has_every_number_once_and_every_number_everywhere() -> None:
    made = [ops.permutation(seed, 6, dtype=torch.int64, device="cpu") for seed in range(600)]
    assert all(sorted(one.tolist()) == [*range(6)] for one in made)
    counts = torch.nn.functional.one_hot(torch.stack(made)).sum(0)
    assert (counts - 100).abs().max() < 6 * math.sqrt(100)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x, **at: ops.poisson(x, 1, **at),
        lambda x, **at: ops.binomial(x.floor(), x / 50, 2, **at),
        lambda x, **at: ops.standard_gamma(x, 3, **at),
        *(
            lambda x, draw=draw, **at: draw(4, extent=x.shape, **at, **DEVICE)
            for draw in (partial(ops.integers, low=0, high=9), ops.uniform, ops.normal)
        ),
    ],
)
def test_a_box_draws_what_the_whole_tensor_draws(draw: Callable[..., Tensor]) -> None:
    x = torch.rand(6, 10, dtype=torch.float64) * 40
    whole = draw(x, lo=(0, 0), shape=(6, 10))
    part = draw(x[2:5, 3:], lo=(2, 3), shape=(6, 10))
    torch.testing.assert_close(part, whole[2:5, 3:], rtol=0, atol=0)


def test_gradient_of_a_gamma_is_that_of_torch() -> None:
    alpha = torch.tensor([0.4, 3.0], dtype=torch.float64, requires_grad=True)
    drawn = ops.standard_gamma(alpha, 1, lo=(0,), shape=(2,))
    drawn.sum().backward()
    torch.testing.assert_close(alpha.grad, torch._standard_gamma_grad(alpha.detach(), drawn))
