"""Plain values as a JSON text: values that are neither tensors of the model nor code.

States of schedulers and random generators have tuples, counters and small tensors. JSON has none of
these, so each is an object with one key that names its type. Nothing is ever unpickled.
"""

from __future__ import annotations

import base64
import json
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from superscaler_core.errors import PlanError

MAX_DEPTH = 100
"""Most values in which a value may be nested; readers in Python need a stack frame for each."""


def text_of(value: Any, what: str) -> str:
    """The text of a plain value; equal values have equal texts.

    Law (tests/superscaler_core/training/test_plain.py): ``value_of(text_of(x, "x"))`` equals ``x``
    and has its types.

    Args:
        value: made of numbers, texts, None, lists, tuples, dicts, counters, tensors and arrays.
        what: the name of the value in messages.

    Raises:
        PlanError: a part of the value is of another type; the message says which part. Or it is
            nested in more than ``MAX_DEPTH`` values, as one that contains itself is.
    """
    return json.dumps(_packed(value, what, MAX_DEPTH))


def value_of(text: str) -> Any:
    """The value that ``text_of`` wrote.

    Raises:
        ValueError: the text has another form.
    """
    try:
        return _unpacked(json.loads(text))
    except _OTHER_FORM as error:
        raise ValueError(f"{type(error).__name__}: {error}") from None


_OTHER_FORM = (
    ValueError, KeyError, TypeError, AttributeError, RuntimeError, OverflowError, MemoryError,
)  # fmt: skip
"""What a text of another form may raise; a RecursionError is a RuntimeError."""


def _packed(value: Any, what: str, depth: int) -> Any:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return value
    if not depth:
        raise PlanError(
            f"{what} is nested in {MAX_DEPTH} values: a saved value is not deeper, and does not "
            "contain itself."
        )
    inner = partial(_packed, depth=depth - 1)
    if kind is list:
        return [inner(v, f"{what}[{i}]") for i, v in enumerate(value)]
    if kind is tuple:
        return {"tuple": [inner(v, f"{what}[{i}]") for i, v in enumerate(value)]}
    if kind in _MAPPINGS.values():
        pairs = [[inner(k, what), inner(v, f"{what}[{k!r}]")] for k, v in value.items()]
        return {kind.__name__: pairs}
    if isinstance(value, np.generic):
        value = np.asarray(value)
    if isinstance(value, np.ndarray) and value.dtype.kind in "biufc":
        return {"array": [value.dtype.str, value.shape, _encoded(np.ascontiguousarray(value))]}
    if isinstance(value, Tensor) and value.layout == torch.strided:
        whole = value.detach().cpu().contiguous()
        # Strides of a tensor of one element may be anything; a view as bytes needs 1.
        data = whole.as_strided((whole.numel(),), (1,)).view(torch.uint8).numpy()
        name = str(whole.dtype).removeprefix("torch.")
        return {"tensor": [name, whole.shape, _encoded(data)]}
    raise PlanError(
        f"{what} is of type {kind.__name__}, which cannot be saved: a saved value is made of "
        "numbers, texts, None, lists, tuples, dicts, tensors and arrays."
    )


_MAPPINGS: Mapping[str, type[Any]] = {k.__name__: k for k in (dict, OrderedDict, Counter)}


def _unpacked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unpacked(v) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind in _MAPPINGS:
        return _MAPPINGS[kind]({_unpacked(k): _unpacked(v) for k, v in content})
    return _OTHERS[kind](content)


def _tensor(content: Any) -> Tensor:
    dtype, shape, data = content
    kind = getattr(torch, dtype)
    if not isinstance(kind, torch.dtype):
        raise TypeError(f"{dtype!r} is no dtype")
    flat = torch.from_numpy(np.frombuffer(_decoded(data), dtype=np.uint8))
    return flat.view(kind).reshape(shape)


def _array(content: Any) -> Any:
    dtype, shape, data = content
    found = np.frombuffer(_decoded(data), dtype=dtype).reshape(shape)
    return found if shape else found[()]


_OTHERS: Mapping[str, Callable[[Any], Any]] = {
    "tuple": lambda content: tuple(map(_unpacked, content)),
    "array": _array,
    "tensor": _tensor,
}


def _encoded(data: Any) -> str:
    return base64.b64encode(data.tobytes()).decode()


def _decoded(text: str) -> bytearray:
    return bytearray(base64.b64decode(text, validate=True))
