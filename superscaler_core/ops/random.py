"""Random numbers by counter: they depend on a seed and an element's place in the whole tensor.

So however a tensor is split, and however often a part is computed, the numbers are the same. The
hash is SplitMix64's (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_BITS = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_FACTORS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))


def mix(*numbers: int) -> int:
    """One seed from several numbers, such as the run's seed, the step and the microbatch.

    >>> mix(0, 1) == mix(0, 1), mix(0, 1) == mix(1, 0)
    (True, False)
    """
    state = 0
    for number in numbers:
        state = (state + (number & _BITS) * _GOLDEN + _GOLDEN) & _BITS
        for shift, factor in _FACTORS:
            state = ((state ^ (state >> shift)) * factor) & _BITS
        state ^= state >> 31
    return state


def uniform_bits(seed: int, lo: Sequence[int], extent: Sequence[int], shape: Sequence[int],
                 device: torch.device | str = "cpu") -> Tensor:  # fmt: skip
    """53 random bits for every element of a box.

    Args:
        seed: any integer.
        lo: place of the box in the whole tensor.
        extent: shape of the box.
        shape: shape of the whole tensor.
        device: device of the result.

    Returns:
        int64 ``[*extent]``, uniform in ``[0, 2**53)``.
    """
    return _shifted(words(seed, lo, extent, shape, device), 11)


def words(seed: int, lo: Sequence[int], extent: Sequence[int], shape: Sequence[int],
          device: torch.device | str = "cpu") -> Tensor:  # fmt: skip
    """64 random bits for every element of a box, as int64; the arguments are as above."""
    places = torch.zeros((), dtype=torch.int64, device=device)
    for low, size, whole in zip(lo, extent, shape, strict=True):
        index = torch.arange(low, low + size, device=device)
        places = places.unsqueeze(-1) * whole + index
    state = places.reshape(tuple(extent)) * _signed(_GOLDEN) + _signed(mix(seed))
    for shift, factor in _FACTORS:
        state = (state ^ _shifted(state, shift)) * _signed(factor)
    return state ^ _shifted(state, 31)


def dropout(x: Tensor, p: float, seed: int, *, lo: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Zero each element with probability ``p`` and scale the others by ``1 / (1 - p)``.

    Args:
        x: a box of the whole tensor.
        p: in [0, 1].
        seed: any integer.
        lo: place of the box in the whole tensor.
        shape: shape of the whole tensor.
    """
    if p >= 1:
        return x * 0
    keep = uniform_bits(seed, lo, x.shape, shape, x.device) >= int(p * (1 << 53))
    return torch.where(keep, x * (1 / (1 - p)), torch.zeros((), dtype=x.dtype, device=x.device))


def _signed(bits: int) -> int:
    """The int64 of the same 64 bits."""
    return bits - (1 << 64) if bits >> 63 else bits


def _shifted(state: Tensor, by: int) -> Tensor:
    """A shift to the right that fills with zeros."""
    return (state >> by) & ((1 << (64 - by)) - 1)


def uniform(
    seed: int, *, lo: Sequence[int], extent: Sequence[int], shape: Sequence[int],
    dtype: torch.dtype, device: torch.device | str,
) -> Tensor:  # fmt: skip
    """Numbers between 0 and 1, both excluded; the arguments are those of ``uniform_bits``.

    They are the middles of equal intervals. A middle has one binary digit more than the number of
    the interval, and all of them fit into the dtype, so that none is rounded to 0 or 1.
    """
    digits = -round(math.log2(torch.finfo(dtype).eps))
    intervals = uniform_bits(seed, lo, extent, shape, device) >> (53 - digits)
    return ((intervals.double() + 0.5) / (1 << digits)).to(dtype)


def normal(
    seed: int, *, lo: Sequence[int], extent: Sequence[int], shape: Sequence[int],
    dtype: torch.dtype, device: torch.device | str,
) -> Tensor:  # fmt: skip
    """Numbers of the standard normal distribution, by the method of Box and Muller."""
    radius, angle = (
        uniform(mix(seed, i), lo=lo, extent=extent, shape=shape, dtype=torch.float64, device=device)
        for i in range(2)
    )
    return (torch.sqrt(-2 * torch.log(radius)) * torch.cos(2 * math.pi * angle)).to(dtype)
