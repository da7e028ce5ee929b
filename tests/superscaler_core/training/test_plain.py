"""Plain values: they are read back as they were written, and other values are refused."""

from __future__ import annotations

from collections import Counter, OrderedDict
from typing import Any

import numpy as np
import pytest
import torch

from superscaler_core.errors import PlanError
from superscaler_core.training.plain import text_of, value_of

VALUES: list[Any] = [
    None, True, 3, -(2**70), 0.1, float("inf"), "a\n", [1, [2.5]], (1, ("x", None)), {}, (),
    {"a": 1, 3: (4,), (1, 2): "pair"}, Counter({4: 1, 6: 2}), OrderedDict(b=1, a=2),
    {"tuple": [1]}, {"tensor": {"array": 0}},
]  # fmt: skip


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_a_value_is_read_back_with_its_types(value: Any) -> None:
    found = value_of(text_of(value, "value"))
    assert found == value
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "dtype, shape",
    [
        (torch.bfloat16, (2, 3)),
        (torch.float64, (3,)),
        (torch.float64, (0, 4)),
        (torch.bool, ()),
        (torch.bool, (2, 3)),
        (torch.int64, ()),
    ],
)
def test_a_tensor_is_read_back_bit_by_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    found = value_of(text_of(tensor, "tensor"))
    torch.testing.assert_close(found, tensor, rtol=0, atol=0)
    found.zero_()  # it owns its memory


def test_view_is_read_back_without_the_rest_of_its_memory() -> None:
    view = torch.arange(12).reshape(3, 4).T[1:]
    found = value_of(text_of(view, "view"))
    assert torch.equal(found, view)
    assert found.untyped_storage().nbytes() == view.numel() * view.element_size()


@pytest.mark.parametrize(
    "array", [np.arange(4, dtype=np.uint32), np.float64(0.5), np.zeros((2, 0))]
)
def test_an_array_is_read_back(array: Any) -> None:
    found = value_of(text_of(array, "array"))
    assert np.array_equal(found, array)
    assert found.dtype == array.dtype


def test_nan_is_read_back() -> None:
    assert np.isnan(value_of(text_of([float("nan")], "value"))[0])


@pytest.mark.parametrize(
    ("value", "place"),
    [(len, "extra"), ({"f": [1, len]}, r"extra\['f'\]\[1\]"), (np.array(["a"]), "extra")],
)
def test_value_that_is_not_plain_raises_plan_error_with_its_path(value: Any, place: str) -> None:
    with pytest.raises(PlanError, match=f"^{place} is of type .* which cannot be saved"):
        text_of(value, "extra")
