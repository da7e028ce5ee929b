"""Every dtype that torch can hold is moved bit by bit, and summed where it has a sum."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import rvdcomm as rv
from rvdcomm.layout import ITEM_BYTES, NOT_SUMMED
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import error_of
from tests.oracle import Array, data_faults, shards_of

pytestmark = pytest.mark.dist

NUM_RANKS = 4
SHAPE = (6, 10)
SUMMED = [name for name in ITEM_BYTES if name not in NOT_SUMMED]
FREE_ROUNDS = rv.Topology.single_host(NUM_RANKS, alpha_secs=0.0, bytes_per_sec=1e9)

MOVES = [
    ("R(1)V(1)D(4,1)", "R(1)V(1)D(1,4)"),
    ("R(1)V(1)D(1,4)", "R(4)V(1)D(1,1)"),
    ("R(2)V(1)D(2,1)", "R(1)V(1)D(2,2)"),
    ("R(1)V(1)D(2,2)", "R(1)V(4)D(1,1)"),
]
"""Exchange of ragged and empty shards, gather, slice, and zeros."""

SUMS = [
    ("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"),
    ("R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)"),
    ("R(1)V(2)D(2,1)", "R(2)V(1)D(1,2)"),
    ("R(2)V(2)D(1,1)", "R(4)V(1)D(1,1)"),
]
"""All-reduce, reduce-scatter, and sums of pieces."""

SPECIAL = {
    "float16": (2, [0x7E00, 0x7C01, 0xFE55, 0x8000, 0xFC00, 0x0001]),
    "bfloat16": (2, [0x7FC0, 0x7F81, 0xFFD5, 0x8000, 0xFF80, 0x0001]),
    "float32": (4, [0x7FC00000, 0x7F800001, 0xFFD55555, 0x80000000, 0xFF800000, 0x00000001]),
    "float64": (8, [0x7FF8 << 48, (0x7FF0 << 48) + 1, 0xFFFA << 48, 0x8000 << 48, 0xFFF0 << 48, 1]),
}
"""Bits of a quiet NaN, a signalling NaN, a NaN with a payload, -0.0, -inf and a subnormal."""
SPECIAL["complex32"], SPECIAL["complex64"] = SPECIAL["float16"], SPECIAL["float32"]
SPECIAL["complex128"] = SPECIAL["float64"]


# --- tensors as bytes ---------------------------------------------------------------------------


def random_bits(dtype: str) -> Array:
    """Bytes ``[*SHAPE, item]`` of a tensor of random bits."""
    rng = np.random.default_rng(0)
    return rng.integers(0, 2 if dtype == "bool" else 256, (*SHAPE, ITEM_BYTES[dtype]), np.uint8)


def special_bits(dtype: str) -> Array:
    """Bytes ``[*SHAPE, item]`` of a tensor of the values that arithmetic would change."""
    width, words = SPECIAL[dtype]
    bits = np.resize(np.array(words, f"<u{width}"), prod(SHAPE) * ITEM_BYTES[dtype] // width)
    return bits.view(np.uint8).reshape(*SHAPE, ITEM_BYTES[dtype])


def layout_of_bytes(layout: rv.Layout, dtype: str) -> rv.Layout:
    """The same layout of a tensor that has the bytes of an element as its last dim."""
    item = ITEM_BYTES[dtype]
    rvd = rv.RVD(layout.rvd.r, layout.rvd.v, (*layout.rvd.d, 1))
    return rv.Layout((*layout.shape, item), rvd, layout.ranks, [*layout.cuts, (0, item)])


def tensor_of_bytes(data: Array, dtype: str) -> Tensor:
    tensor = torch.empty(data.shape[:-1], dtype=getattr(torch, dtype))
    tensor.view(-1).view(torch.uint8).copy_(torch.from_numpy(data.reshape(-1)))
    return tensor


def bytes_of(tensor: Tensor) -> Array:
    flat = tensor.contiguous().view(-1).view(torch.uint8).numpy()
    return flat.reshape(*tensor.shape, tensor.element_size())


def assert_data(result: Array, dst: rv.Layout, parts: list[Array]) -> None:
    results: list[Any] = [None] * NUM_RANKS
    dist.all_gather_object(results, result)
    assert data_faults(dst, dict(enumerate(results)), parts) == []


# --- V = 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, bits",
    [
        *((dtype, random_bits) for dtype in ITEM_BYTES),
        *((dtype, special_bits) for dtype in SPECIAL),
    ],
)
@on_ranks(NUM_RANKS)
def test_moves_keep_every_bit(rank: int, dtype: str, bits: Callable[[str], Array]) -> None:
    """Of random elements, and of NaNs, infinities and signs of zeros."""
    # torch warns that its complex32 is experimental; rvdcomm cannot change that.
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    # A dtype without a sum has no layout with parts.
    number = list(ITEM_BYTES).index(dtype) + (bits is special_bits)
    src, dst = (rv.Layout(SHAPE, rvd) for rvd in MOVES[number % (3 if dtype in NOT_SUMMED else 4)])
    data = bits(dtype)
    mine = shards_of(layout_of_bytes(src, dtype), [data])[rank]
    tensor = tensor_of_bytes(mine, dtype)
    result = rv.redistribute(tensor, src, dst, topology=FREE_ROUNDS)
    assert str(result.dtype) == f"torch.{dtype}"
    assert np.array_equal(bytes_of(tensor), mine), "the input was modified"
    assert_data(bytes_of(result), layout_of_bytes(dst, dtype), [data])


# --- V > 1 --------------------------------------------------------------------------------------


def small_parts(dtype: str, num_parts: int) -> list[Array]:
    """Whole numbers, complex ones for complex dtypes, whose sums no dtype has to round."""
    rng = np.random.default_rng(1)
    low = 0 if dtype.startswith("uint") else -1
    parts = [rng.integers(low, 2, SHAPE).astype(np.complex128) for _ in range(num_parts)]
    if dtype.startswith("complex"):
        parts = [part + 1j * rng.integers(low, 2, SHAPE) for part in parts]
    return parts


@pytest.mark.parametrize(
    "dtype, src_rvd, dst_rvd", [(dt, *SUMS[i % 4]) for i, dt in enumerate(SUMMED)]
)
@on_ranks(NUM_RANKS)
def test_parts_are_summed_exactly(rank: int, dtype: str, src_rvd: str, dst_rvd: str) -> None:
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    src, dst = rv.Layout(SHAPE, src_rvd), rv.Layout(SHAPE, dst_rvd)
    parts = small_parts(dtype, src.rvd.v)
    values = torch.from_numpy(shards_of(src, parts)[rank])
    values = values if dtype.startswith("complex") else values.real.clone()
    # Not all dtypes can be made from float64 at once.
    tensor = values.to(torch.int64 if dtype.startswith("uint") else values.dtype)
    result = rv.redistribute(tensor.to(getattr(torch, dtype)), src, dst, topology=FREE_ROUNDS)
    # Complex numbers hold the values of all dtypes here.
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    assert_data(result.to(wide).numpy().astype(np.complex128), dst, parts)


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"])
@on_ranks(NUM_RANKS)
def test_sums_of_integers_wrap_around_as_in_torch(rank: int, dtype: str) -> None:
    info = torch.iinfo(getattr(torch, dtype))
    tensor = torch.full((4,), info.max, dtype=getattr(torch, dtype))
    result = rv.redistribute(tensor, "R(1)V(4)D(1)", "R(4)V(1)D(1)", topology=FREE_ROUNDS)
    assert result.tolist() == [(4 * info.max - info.min) % 2**info.bits + info.min] * 4


@pytest.mark.parametrize("dtype", sorted(NOT_SUMMED))
@pytest.mark.parametrize(
    "src_rvd, dst_rvd", [("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"), ("R(4)V(1)D(1,1)", "R(1)V(4)D(1,1)")]
)
@on_ranks(NUM_RANKS)
def test_parts_of_a_dtype_without_sum_are_an_error_on_every_rank(
    rank: int, dtype: str, src_rvd: str, dst_rvd: str
) -> None:
    tensor = torch.zeros((2, 4), dtype=getattr(torch, dtype))
    assert error_of(lambda: rv.redistribute(tensor, src_rvd, dst_rvd, shape=(2, 4))) == (
        f"LayoutError: redistribute {src_rvd} -> {dst_rvd}: R(1)V(4)D(1,1) has V(4), but {dtype} "
        "values cannot be summed; use V(1) or another dtype."
    )
