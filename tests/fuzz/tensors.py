"""Tensors: inputs and outputs of a rank's call, in every dtype, contiguous or strided.

Values are small integers, so that sums are exact in every dtype, including float8.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor

from tests.fuzz.draw import Case
from tests.oracle import Array, sliced

TOPS = {"bool": 2, "float8_e5m2": 2, "float8_e5m2fnuz": 2, "float8_e4m3fn": 2, "float8_e4m3fnuz": 2}
"""Exclusive upper bounds of values, by dtype; other dtypes have the bound 12.

A float8_e5m2 has 3 significant bits, so sums up to 8 are exact.
"""


def whole_parts(case: Case) -> list[Array]:
    """The value parts: whole tensors, as int64 or complex128, whose sum is the tensor."""
    rng = np.random.default_rng(case.index)
    top, count = TOPS.get(case.dtype, 12), case.src.rvd.v
    low = 0 if case.dtype.startswith(("u", "bool", "float8")) else 1 - top
    if case.dtype == "float8_e8m0fnu":
        low, top = 1, 2  # This dtype has only powers of 2: no zero, and no sums.
    parts = [rng.integers(low, top, case.src.shape) for _ in range(count)]
    if case.dtype.startswith("complex"):
        return [part + 1j * rng.integers(low, top, case.src.shape) for part in parts]
    return parts


def tensor_of(rank: int, case: Case, parts: list[Array], rng: random.Random) -> Tensor | None:
    """The shard of ``rank``, contiguous or strided; None outside src."""
    if rank not in case.src:
        return None
    cell = case.src.cell(rank)
    shard = torch.from_numpy(np.array(sliced(parts[cell.part], cell.box)))
    return strided(as_dtype(shard, case.dtype), rng)


def as_dtype(wide: Tensor, dtype: str) -> Tensor:
    if dtype == "complex32":
        wide = wide.to(torch.complex64)
    if dtype.startswith("float8"):
        wide = wide.to(torch.float32)
    return wide.to(getattr(torch, dtype))


def as_wide(tensor: Tensor) -> Array:
    """The values as int64, or as complex64 (for complex32) or complex128."""
    if tensor.is_complex():
        return tensor.to(torch.complex64 if tensor.itemsize == 4 else torch.complex128).numpy()
    if tensor.itemsize == 1 and tensor.is_floating_point():
        tensor = tensor.to(torch.float32)
    return tensor.to(torch.int64).numpy()


def strided(tensor: Tensor, rng: random.Random) -> Tensor:
    """A tensor with the same values and random strides."""
    kind = rng.choice(["contiguous", "contiguous", "transposed", "gaps"])
    if tensor.dim() == 0 or kind == "contiguous":
        return tensor.contiguous()
    if kind == "transposed":
        return (
            _empty_like(tensor, tensor.shape[::-1])
            .permute(*reversed(range(tensor.dim())))
            .copy_(tensor)
        )
    wide = _empty_like(tensor, (*tensor.shape[:-1], 2 * tensor.shape[-1] + 1))
    return wide[..., 1::2].copy_(tensor)


def out_of(rank: int, case: Case, rng: random.Random) -> Tensor | None:
    """A random ``out`` tensor for the result, or None."""
    if rank not in case.dst or rng.random() < 0.5:
        return None
    shape = case.dst.cell(rank).box.shape
    return strided(torch.zeros(shape, dtype=getattr(torch, case.dtype)), rng)


def _empty_like(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    return torch.empty(shape, dtype=tensor.dtype)
