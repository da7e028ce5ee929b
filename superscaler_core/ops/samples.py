"""Samples by counter: draws of distributions whose parameters are numbers or tensors.

As in ``random``, each depends on a seed and its place in the whole tensor. Draws that torch makes
by rejection go on until every element has one; on the meta device there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from superscaler_core.ops.random import mix, normal, uniform, words

_BITS = 63
"""Bits of a nonnegative int64."""


def integers(
    seed: int, low: int, high: int, *, lo: Sequence[int], extent: Sequence[int],
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str,
) -> Tensor:  # fmt: skip
    """Integers in ``[low, high)``; the other arguments are those of ``uniform_bits``.

    Their probabilities differ by less than one in ``2**63 / (high - low)``.
    """
    drawn = (words(seed, lo, extent, shape, device) >> 1) & ((1 << _BITS) - 1)
    return (drawn % (high - low) + low).to(dtype)


def permutation(seed: int, size: int, *, dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """The numbers from 0 to ``size`` in a random order."""
    keys = words(seed, (0,), (size,), (size,), device)
    return keys.argsort(stable=True).to(dtype)


def multinomial(
    weights: Tensor, num_samples: int, replacement: bool, seed: int, *, row: int, num_rows: int
) -> Tensor:
    """Numbers of columns, drawn for each row with these probabilities up to a factor.

    Args:
        weights: rows of the whole tensor, or one row alone, ``[(rows,) columns]``.
        num_samples: draws for each row.
        replacement: whether a column may be drawn twice.
        seed: any integer.
        row: number of the first row in the whole tensor.
        num_rows: rows of the whole tensor.
    """
    rows = weights.detach().reshape(-1, weights.shape[-1]).double()
    is_alone = replacement or num_samples == 1  # whether a draw depends on no other
    size = num_samples if is_alone else rows.shape[1]
    drawn = uniform(
        seed, lo=(row, 0), extent=(len(rows), size), shape=(num_rows, size), dtype=torch.float64,
        device=weights.device,
    )  # fmt: skip
    if is_alone:
        sums = rows.cumsum(-1)
        found = torch.searchsorted(sums, drawn * sums[:, -1:], right=True)
        found = found.clamp(max=rows.shape[1] - 1)
    else:
        # The first of clocks that ring at these rates; the next is the first among the others.
        found = (rows / -torch.log(drawn)).topk(num_samples).indices
    return found.reshape(*weights.shape[:-1], num_samples)


def poisson(rate: Tensor, seed: int, *, lo: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Counts of events that have these mean numbers, by bisection of the distribution function.

    Args:
        rate: a box of the whole tensor, at least 0.
        seed: any integer.
        lo: place of the box in the whole tensor.
        shape: shape of the whole tensor.
    """
    mean = rate.detach().double()
    level = _uniform_of(mean, seed, lo, shape)
    below = torch.full_like(mean, -1.0)
    # Beyond this, less is left than the last of the 53 digits of a level.
    above = (mean + 12 * mean.sqrt() + 60).floor()
    while not mean.is_meta and bool((above - below > 1).any()):
        middle = ((below + above) / 2).floor()
        is_enough = torch.special.gammaincc(middle + 1, mean) >= level
        above, below = torch.where(is_enough, middle, above), torch.where(is_enough, below, middle)
    return above.to(rate.dtype)


def binomial(
    count: Tensor, p: Tensor, seed: int, *, lo: Sequence[int], shape: Sequence[int]
) -> Tensor:
    """How many of ``count`` trials succeed, each with probability ``p``: trial by trial.

    Args:
        count, p: boxes of whole tensors, of one shape.
        seed, lo, shape: as in ``poisson``.
    """
    p, found = p.detach().double(), torch.zeros_like(count)
    most = 0 if count.is_meta or not count.numel() else int(count.max())
    for trial in range(most):
        found += (_uniform_of(p, mix(seed, trial), lo, shape) < p) & (trial < count)
    return found


def standard_gamma(alpha: Tensor, seed: int, *, lo: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Draws of gamma distributions of rate 1, with torch's gradient with respect to ``alpha``.

    Source: Marsaglia, Tsang: A simple method for generating gamma variables, 2000.

    Args:
        alpha: a box of the whole tensor, above 0.
        seed, lo, shape: as in ``poisson``.
    """
    wide = alpha.detach().double()
    is_low = wide < 1
    d = torch.where(is_low, wide + 1, wide) - 1 / 3
    found, is_left, turn = torch.full_like(d, torch.nan), d == d, 0
    while not d.is_meta and bool(is_left.any()):
        x = normal(mix(seed, turn), lo=lo, extent=d.shape, shape=shape, dtype=d.dtype,
                   device=d.device)  # fmt: skip
        v = (1 + x / (9 * d).sqrt()) ** 3
        # The logarithm of a negative number is NaN, which is not below anything.
        limit = 0.5 * x**2 + d * (1 - v + v.log())
        is_taken = is_left & (_uniform_of(d, mix(seed, turn, 1), lo, shape).log() < limit)
        found = torch.where(is_taken, d * v, found)
        is_left, turn = is_left & ~is_taken, turn + 1
    scale = torch.where(is_low, _uniform_of(d, mix(seed, 0, 2), lo, shape) ** (1 / wide), 1.0)
    made: Tensor = _Gamma.apply(alpha, (found * scale).to(alpha.dtype))  # type: ignore[no-untyped-call]
    return made


class _Gamma(torch.autograd.Function):
    """A draw as a function of the parameter with which it was drawn."""

    @staticmethod
    def forward(ctx: Any, alpha: Tensor, drawn: Tensor) -> Tensor:
        ctx.save_for_backward(alpha, drawn)
        return drawn.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        alpha, drawn = ctx.saved_tensors
        return grad * torch._standard_gamma_grad(alpha, drawn), None


def _uniform_of(like: Tensor, seed: int, lo: Sequence[int], shape: Sequence[int]) -> Tensor:
    return uniform(
        seed, lo=lo, extent=like.shape, shape=shape, dtype=torch.float64, device=like.device
    )
