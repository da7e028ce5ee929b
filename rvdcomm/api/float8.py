"""float8: conversion of values to float8 and back, with a scale."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rvdcomm.api.tensors import fault_of

Scale = float | Tensor
"""The value that 1.0 in float8 stands for; a tensor is broadcast to the shape of the values."""


def is_float8(dtype: str) -> bool:
    """Whether a dtype has eight bits of floating point."""
    return dtype.startswith("float8")


def fault_of_scale(scale: Any) -> str | None:
    """Why no tensor can be scaled by ``scale``, as a text like that of ``fault_of``."""
    return None if isinstance(scale, float | int) else fault_of(scale)


def fits(scale: Scale | None, shape: tuple[int, ...]) -> bool:
    """Whether the scale broadcasts to values of this shape.

    >>> fits(torch.ones(3), (2, 3)), fits(torch.ones(2, 3), (1, 3)), fits(0.5, ())
    (True, False, True)
    """
    if not isinstance(scale, Tensor):
        return True
    pairs = zip(reversed(scale.shape), reversed(shape), strict=False)
    return scale.dim() <= len(shape) and all(size in (1, full) for size, full in pairs)


def has_device(scale: Scale) -> bool:
    """Whether the scale must be on the device of the values: all but scalars of the CPU."""
    return isinstance(scale, Tensor) and (scale.dim() > 0 or scale.device.type != "cpu")


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
