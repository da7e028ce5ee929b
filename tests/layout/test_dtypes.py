"""Laws of dtype names and sizes, against numpy and torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rvdcomm as rv
from rvdcomm.layout import ITEM_BYTES, NOT_SUMMED, check_summable, dtype_name

NUMPY_NAMES = sorted(
    name for name in ITEM_BYTES if hasattr(np, name) and isinstance(getattr(np, name), type)
)


def test_every_dtype_exists_in_torch_with_the_same_item_size() -> None:
    assert {name: getattr(torch, name).itemsize for name in ITEM_BYTES} == dict(ITEM_BYTES)


@pytest.mark.parametrize(
    "dtype, name",
    [
        *((getattr(torch, name), name) for name in ITEM_BYTES),
        *((name, name) for name in ITEM_BYTES),
        *((np.dtype(name), name) for name in NUMPY_NAMES),
        *((getattr(np, name), name) for name in NUMPY_NAMES),
        *(("float", "float32"), ("half", "float16"), ("double", "float64")),
    ],
)
def test_dtype_name_accepts_dtypes_of_torch_and_numpy_and_names(dtype: object, name: str) -> None:
    assert dtype_name(dtype) == name


@pytest.mark.parametrize("dtype", ["float24", "", "torch.", None, 7, object()])
def test_unknown_dtypes_are_rejected(dtype: object) -> None:
    with pytest.raises(rv.LayoutError, match="is unknown; the known ones are bool, uint8"):
        dtype_name(dtype)


@pytest.mark.parametrize("name", sorted(NOT_SUMMED))
def test_parts_of_dtypes_without_a_sum_are_rejected(name: str) -> None:
    layouts = [rv.Layout((6,), "R(3)V(1)D(1)"), rv.Layout((6,), "R(1)V(3)D(1)")]
    message = rf"R\(1\)V\(3\)D\(1\) has V\(3\), but {name} values cannot be summed; use V\(1\)"
    with pytest.raises(rv.LayoutError, match=message):
        check_summable(name, layouts)


@pytest.mark.parametrize("name", sorted(set(ITEM_BYTES) - NOT_SUMMED))
def test_parts_of_dtypes_with_a_sum_are_accepted(name: str) -> None:
    check_summable(name, [rv.Layout((6,), "R(1)V(3)D(1)")])


def test_bool_without_parts_is_accepted() -> None:
    check_summable("bool", [rv.Layout((6,), "R(3)V(1)D(1)")])
