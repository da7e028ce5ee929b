"""float8: conversion of values to float8 and back, with a scale."""

from __future__ import annotations

import torch
from torch import Tensor

Scale = float | Tensor
"""The value that 1.0 in float8 stands for; a tensor is broadcast to the shape of the values."""


def is_float8(dtype: str) -> bool:
    """Whether a dtype has eight bits of floating point."""
    return dtype.startswith("float8")


def quantized(tensor: Tensor, scale: Scale, dtype: torch.dtype) -> Tensor:
    """``tensor / scale`` rounded to float8; values beyond its range become its largest.

    >>> quantized(torch.tensor([1.0, -900.0]), 0.5, torch.float8_e4m3fn).float()
    tensor([   2., -448.])
    """
    largest = torch.finfo(dtype).max
    return (tensor.float() / scale).clamp_(-largest, largest).to(dtype)


def dequantized(tensor: Tensor, scale: Scale, out: Tensor) -> None:
    """Write ``tensor * scale`` to ``out``, which has another dtype."""
    out.copy_(tensor.float() * scale)
