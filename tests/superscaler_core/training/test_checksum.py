"""``checksum``: equal for equal bits alone, whatever the strides, the dtype and the alignment."""

from __future__ import annotations

import pytest
import torch

from superscaler_core.training.checksum import checksum

DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64]


@pytest.mark.parametrize(
    "dtype, shape",
    [*zip(DTYPES, [(), (3, 5, 11), (0,), (300, 1001), (7,), (3, 5, 11)], strict=True)],
)
def test_equal_values_have_equal_checksums(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    wide = x[..., None].repeat(*[1] * len(shape), 3) if shape else x[None].repeat(3)
    assert (
        checksum(x) == checksum(wide[..., 1]) == checksum(torch.cat([x.flatten()] * 2)[x.numel() :])
    )


@pytest.mark.parametrize("place", [0, 5, 2**17, 299_999])
def test_one_bit_changes_the_checksum(place: int) -> None:
    x = torch.zeros(300_000, dtype=torch.uint8)
    before = checksum(x)
    x[place] = 1
    assert checksum(x) != before


def test_order_and_number_of_values_change_the_checksum() -> None:
    x = torch.arange(6)
    assert len({checksum(each) for each in (x, x.flip(0), x[:5], torch.cat([x, x[:1] * 0]))}) == 4


def test_strides_of_one_element_do_not_matter() -> None:
    x = torch.tensor(1.5)
    assert checksum(x) == checksum(x.expand(1, 1)) == checksum(torch.zeros(1, 9)[:, 1:2] + 1.5)
