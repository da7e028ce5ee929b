"""Element types by name: planning imports no torch, and numpy lacks some of the types."""

from __future__ import annotations

from typing import Any

from rvdcomm.errors import LayoutError
from rvdcomm.text import quoted

ITEM_BYTES = {
    "bool": 1,
    "uint8": 1, "uint16": 2, "uint32": 4, "uint64": 8,
    "int8": 1, "int16": 2, "int32": 4, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip
"""Bytes per element of every dtype that can be moved."""

NOT_SUMMED = frozenset({"bool", "float8_e8m0fnu"})
"""Dtypes without a sum; layouts with V > 1 are not allowed for them."""

SUMMED_BY_BACKENDS = frozenset(
    {"uint8", "int8", "int32", "int64", "float16", "bfloat16", "float32", "float64"}
)
"""Dtypes that gloo and NCCL both sum in an all_reduce. rvdcomm adds all others itself."""


def dtype_name(dtype: Any) -> str:
    """The name of a dtype, which is given as a torch dtype, a numpy dtype or a name.

    >>> dtype_name("torch.bfloat16")
    'bfloat16'

    Raises:
        LayoutError: the dtype is not in ``ITEM_BYTES``.
    """
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or str(dtype)
    name = {"float": "float32", "half": "float16", "double": "float64"}.get(name, name)
    name = name.removeprefix("torch.")
    if name not in ITEM_BYTES:
        raise LayoutError(
            f"dtype {quoted(name)} is unknown; the known ones are {', '.join(ITEM_BYTES)}."
        )
    return name


def check_summable(name: str, layouts: list[Any]) -> None:
    """Raise a LayoutError if a layout has V > 1 and the dtype has no sum."""
    for layout in layouts:
        if layout.rvd.v > 1 and name in NOT_SUMMED:
            raise LayoutError(
                f"{layout.rvd} has V({layout.rvd.v}), but {name} values cannot be summed; "
                "use V(1) or another dtype."
            )
