"""Digests: equal for equal values, however a tensor is cut; other for every error that is tried."""

from __future__ import annotations

import random
from itertools import pairwise, product

import pytest
import torch
from torch import Tensor

from rvdcomm import Box, ShapeMismatchError, digest
from rvdcomm.arrival.digests import defined_digest, digest_converted, factor

DTYPES = [
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float16),
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
]
SHAPES = [(), (0, 3), (1,), (5,), (3, 4), (2, 9000), (9000, 2), (3, 4, 5), (2, 3, 2, 3)]


def values(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    wide = torch.complex128 if dtype.is_complex else torch.float64
    return (torch.randn(shape, generator=generator, dtype=wide) * 50).to(dtype)


def box_of(tensor: Tensor) -> Box:
    return Box.of_shape(tensor.shape)


@pytest.mark.native
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_native_digest_is_as_defined(dtype: torch.dtype) -> None:
    for shape in SHAPES:
        tensor = values(shape, dtype)
        views = [tensor, tensor.transpose(0, -1) if tensor.dim() else tensor]
        views += [tensor[..., ::2], tensor[..., 1:]] if tensor.dim() else []
        for view in views:
            low = tuple(range(4090, 4090 + view.dim()))
            box = Box(low, tuple(a + n for a, n in zip(low, view.shape, strict=True)))
            assert digest(view, box) == defined_digest(view, box)


@pytest.mark.native
def test_views_that_negate_count_with_their_values() -> None:
    tensor = values((4, 3), torch.complex64)
    for view in (tensor.conj(), tensor.conj().imag):
        assert digest(view) == digest(view.resolve_conj().resolve_neg().clone())
        assert digest(view) != digest(tensor if view.is_complex() else tensor.imag)


def random_cuts(draw: random.Random, shape: tuple[int, ...]) -> list[Box]:
    cuts = [sorted({0, n, *(draw.randrange(n + 1) for _ in range(2))}) for n in shape]
    grid = product(*(pairwise(cut) for cut in cuts))
    return [Box(tuple(a for a, _ in cell), tuple(b for _, b in cell)) for cell in grid]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64])
def test_digests_of_boxes_that_tile_add_up(dtype: torch.dtype) -> None:
    draw = random.Random(0)
    for shape in [(9,), (7, 5), (3, 5000), (4, 3, 6)]:
        tensor = values(shape, dtype)
        for _ in range(10):
            boxes = random_cuts(draw, shape)
            draw.shuffle(boxes)
            parts = [digest(tensor[box.slices_within(box_of(tensor))], box) for box in boxes]
            assert sum(parts) % 2**64 == digest(tensor)


def errors(tensor: Tensor) -> dict[str, Tensor]:
    """What may go wrong with a tensor of rows."""
    half = tensor.shape[0] // 2
    found = {name: tensor.clone() for name in ("zeroed", "signs", "shifted", "doubled")}
    found["zeroed"][1] = 0
    found["signs"][0, 0] *= -1
    found["signs"][1, 1] *= -1
    found["shifted"][1:] = tensor[:-1]
    found["doubled"][half:] = tensor[:half]
    found["rows"] = tensor[[1, 0, *range(2, tensor.shape[0])]]
    found["halves"] = torch.cat([tensor[half:], tensor[:half]])
    found["turned"] = tensor.t().contiguous()
    found["columns"] = tensor.flip(1)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_errors_change_the_digest(dtype: torch.dtype) -> None:
    tensor = values((8, 8), dtype)
    wrong = errors(tensor)
    found = {name: digest(each) for name, each in wrong.items()} | {"right": digest(tensor)}
    assert len(set(found.values())) == len(found)


def test_every_bit_counts() -> None:
    for dtype, same in [(torch.float32, torch.int32), (torch.float64, torch.int64)]:
        tensor = values((3, 2), dtype)
        seen = {digest(tensor)}
        for place in range(6):
            for bit in range(torch.iinfo(same).bits - 1):
                wrong = tensor.clone()
                wrong.view(same).view(-1)[place] ^= 1 << bit
                seen.add(digest(wrong))
        assert len(seen) == 1 + 6 * (torch.iinfo(same).bits - 1)


def test_zeros_and_nothing_differ() -> None:
    assert digest(torch.zeros(4)) != digest(torch.zeros(5))
    assert digest(torch.zeros(0)) == 0
    assert digest(torch.tensor(0.0)) != 0


def test_a_negative_zero_and_each_nan_are_values_of_their_own() -> None:
    assert digest(torch.tensor([0.0])) != digest(torch.tensor([-0.0]))
    assert digest(torch.tensor([float("nan")])) == digest(torch.tensor([float("nan")]))


def test_factors_are_odd_and_all_others() -> None:
    found = [factor(d, i) for d in range(3) for i in range(5000)]
    assert all(each % 2 for each in found)
    assert len(set(found)) == len(found)


def test_converted_values_count_all_nans_as_one() -> None:
    box = Box((3,), (7,))
    values = torch.tensor([1.0, float("nan"), -2.5, 1e30])
    other = values.clone()
    other.view(torch.int32)[1] ^= 1 << 31
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        found = digest_converted(values, box, dtype)
        assert found == digest_converted(other, box, dtype)
        assert found != digest_converted(-values, box, dtype)
    assert digest_converted(values[:1], Box((3,), (4,)), torch.bfloat16) == digest(
        values[:1].bfloat16(), Box((3,), (4,))
    )


def test_a_shard_has_the_shape_of_its_box() -> None:
    with pytest.raises(ShapeMismatchError, match=r"the tensor is \[3\], and box \[0:4\] is \[4\]"):
        digest(torch.ones(3), Box((0,), (4,)))
