"""Every dtype that torch can hold is moved bit by bit, and summed where it has a sum."""

from __future__ import annotations

import warnings
from math import prod

import numpy as np
import pytest
import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.layout import ITEM_BYTES, NOT_SUMMED
from tests.dist.shards import error_of
from tests.dist.world import Worlds
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


def redistribute_bytes(
    rank: int, src: rv.Layout, dst: rv.Layout, dtype: str, shards: dict[int, Array]
) -> tuple[Array, Array, str]:
    """Bytes of the result, bytes of the input afterwards, and the dtype of the result."""
    # torch warns that its complex32 is experimental; rvdcomm cannot change that.
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    tensor = tensor_of_bytes(shards[rank], dtype)
    result = rv.redistribute(tensor, src, dst, topology=FREE_ROUNDS)
    return bytes_of(result), bytes_of(tensor), str(result.dtype)


def faults_of_move(
    worlds: Worlds, src_rvd: str, dst_rvd: str, dtype: str, data: Array
) -> list[str]:
    """What goes wrong with the bits of ``data``."""
    src, dst = rv.Layout(SHAPE, src_rvd), rv.Layout(SHAPE, dst_rvd)
    shards = shards_of(layout_of_bytes(src, dtype), [data])
    seen = worlds(NUM_RANKS).run(redistribute_bytes, src, dst, dtype, shards)
    results = {rank: got for rank, (got, _, _) in enumerate(seen)}
    faults = data_faults(layout_of_bytes(dst, dtype), results, [data])
    for rank, (_, kept, name) in enumerate(seen):
        if not np.array_equal(kept, shards[rank]):
            faults.append(f"rank {rank}: the input was modified")
        if name != f"torch.{dtype}":
            faults.append(f"rank {rank}: the result is {name}")
    return faults


# --- V = 1 --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtype, src_rvd, dst_rvd",
    # A dtype without a sum has no layout with parts.
    [(dt, *MOVES[i % (3 if dt in NOT_SUMMED else 4)]) for i, dt in enumerate(ITEM_BYTES)],
)
def test_moves_keep_every_bit(worlds: Worlds, dtype: str, src_rvd: str, dst_rvd: str) -> None:
    assert faults_of_move(worlds, src_rvd, dst_rvd, dtype, random_bits(dtype)) == []


@pytest.mark.parametrize(
    "dtype, src_rvd, dst_rvd", [(dt, *MOVES[i % 4]) for i, dt in enumerate(SPECIAL)]
)
def test_moves_keep_nans_and_signs_of_zeros(
    worlds: Worlds, dtype: str, src_rvd: str, dst_rvd: str
) -> None:
    assert faults_of_move(worlds, src_rvd, dst_rvd, dtype, special_bits(dtype)) == []


# --- V > 1 --------------------------------------------------------------------------------------


def small_parts(dtype: str, num_parts: int) -> list[Array]:
    """Whole numbers, complex ones for complex dtypes, whose sums no dtype has to round."""
    rng = np.random.default_rng(1)
    low = 0 if dtype.startswith("uint") else -1
    parts = [rng.integers(low, 2, SHAPE).astype(np.complex128) for _ in range(num_parts)]
    if dtype.startswith("complex"):
        parts = [part + 1j * rng.integers(low, 2, SHAPE) for part in parts]
    return parts


def redistribute_values(
    rank: int, src: rv.Layout, dst: rv.Layout, dtype: str, shards: dict[int, Array]
) -> Array:
    """The result as complex numbers, which hold the values of all dtypes here."""
    warnings.filterwarnings("ignore", "ComplexHalf support is experimental")
    values = torch.from_numpy(shards[rank])
    values = values if dtype.startswith("complex") else values.real.clone()
    # Not all dtypes can be made from float64 at once.
    tensor = values.to(torch.int64 if dtype.startswith("uint") else values.dtype)
    result = rv.redistribute(tensor.to(getattr(torch, dtype)), src, dst, topology=FREE_ROUNDS)
    wide = torch.complex128 if dtype.startswith("complex") else torch.float64
    return result.to(wide).numpy().astype(np.complex128)


@pytest.mark.parametrize(
    "dtype, src_rvd, dst_rvd", [(dt, *SUMS[i % 4]) for i, dt in enumerate(SUMMED)]
)
def test_parts_are_summed_exactly(worlds: Worlds, dtype: str, src_rvd: str, dst_rvd: str) -> None:
    src, dst = rv.Layout(SHAPE, src_rvd), rv.Layout(SHAPE, dst_rvd)
    parts = small_parts(dtype, src.rvd.v)
    args = (redistribute_values, src, dst, dtype, shards_of(src, parts))
    results = dict(enumerate(worlds(NUM_RANKS).run(*args)))
    assert data_faults(dst, results, parts) == []


def wrap_around(rank: int, dtype: str) -> list[int]:
    top = torch.iinfo(getattr(torch, dtype)).max
    tensor = torch.full((4,), top, dtype=getattr(torch, dtype))
    result = rv.redistribute(tensor, "R(1)V(4)D(1)", "R(4)V(1)D(1)", topology=FREE_ROUNDS)
    return result.tolist()


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32", "int8", "int16", "int32", "int64"])
def test_sums_of_integers_wrap_around_as_in_torch(worlds: Worlds, dtype: str) -> None:
    info = torch.iinfo(getattr(torch, dtype))
    wrapped = (4 * info.max - info.min) % 2**info.bits + info.min
    assert worlds(NUM_RANKS).run(wrap_around, dtype) == [[wrapped] * 4] * NUM_RANKS


def add_without_sum(rank: int, dtype: str, src: str, dst: str) -> str:
    tensor = torch.zeros((2, 4), dtype=getattr(torch, dtype))
    return error_of(lambda: rv.redistribute(tensor, src, dst, shape=(2, 4)))


@pytest.mark.parametrize("dtype", sorted(NOT_SUMMED))
@pytest.mark.parametrize(
    "src_rvd, dst_rvd",
    [("R(1)V(4)D(1,1)", "R(4)V(1)D(1,1)"), ("R(4)V(1)D(1,1)", "R(1)V(4)D(1,1)")],
)
def test_parts_of_a_dtype_without_sum_are_an_error_on_every_rank(
    worlds: Worlds, dtype: str, src_rvd: str, dst_rvd: str
) -> None:
    message = (
        f"LayoutError: redistribute {src_rvd} -> {dst_rvd}: R(1)V(4)D(1,1) has V(4), but {dtype} "
        "values cannot be summed; use V(1) or another dtype."
    )
    errors = worlds(NUM_RANKS).run(add_without_sum, dtype, src_rvd, dst_rvd)
    assert errors == [message] * NUM_RANKS
