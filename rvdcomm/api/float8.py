"""float8: values with a scale, on their way into and out of eight bits."""

from __future__ import annotations

import torch
from torch import Tensor

Scale = float | Tensor
"""What 1.0 of a float8 value stands for; a tensor broadcasts against the values."""


def is_float8(dtype: str) -> bool:
    """Whether a dtype has eight bits of floating point."""
    return dtype.startswith("float8")


def quantized(tensor: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    """``tensor / scale`` as float8, nearest, values beyond its range as its largest.

    >>> quantized(torch.tensor([1.0, -900.0]), 0.5, torch.float8_e4m3fn).float()
    tensor([   2., -448.])
    """
    largest = torch.finfo(dtype).max
    return (tensor.float() / scale).clamp_(-largest, largest).to(dtype)


def dequantized(tensor: Tensor, scale: Scale, out: Tensor) -> None:
    """Write ``tensor * scale`` to ``out``, which has another dtype."""
    out.copy_(tensor.float() * scale)
