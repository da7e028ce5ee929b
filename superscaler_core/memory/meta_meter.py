"""MetaMeter: runs operators on tensors without data, each form of a call once."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from superscaler_core.known import Known
from superscaler_core.memory.piece import Strided
from superscaler_core.run.live_bytes import StorageMeter, tensors_of

MAX_CALLS = 1 << 14
"""Bound on calls of operators whose results are known, some hundred bytes each."""

_KNOWN: Known[Hashable, tuple[Strided, ...]] = Known(MAX_CALLS)


class MetaMeter(StorageMeter):  # type: ignore[no-untyped-call]
    """Counts tensors on the meta device, whose operators are slow: they run in Python."""

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run an operator; if its results are known, allocate them instead."""
        if not _makes_all(func):
            return func(*args, **kwargs)
        key = func, _form(args), _form(tuple(kwargs.items()))
        found = _KNOWN.get(key)
        if found is not None:
            made = tuple(map(_empty, found))
            return made if len(made) > 1 else made[0]
        result = func(*args, **kwargs)
        results = result if isinstance(result, tuple) else (result,)
        if all(isinstance(x, Tensor) and x.is_meta for x in results):
            # Some operators whose schema says that they allocate their result return a view of an
            # input, for example ``_unsafe_view``.
            given = {id(x.untyped_storage()) for x in tensors_of((*args, *kwargs.values()))}
            if given.isdisjoint(id(x.untyped_storage()) for x in results):
                _KNOWN[key] = tuple(map(Strided.of, results))
        return result


def _form(value: Any) -> Any:
    """The properties of an argument on which the results of an operator depend, without data."""
    if isinstance(value, Tensor):
        return value.shape, value.stride(), value.dtype
    if isinstance(value, list | tuple):
        return tuple(map(_form, value))
    # 1 and 1.0 are equal, but make tensors of different dtypes.
    return type(value), value


def _empty(form: Strided) -> Tensor:
    return torch.empty_strided(form.shape, form.stride, dtype=form.dtype, device="meta")


@cache
def _makes_all(func: Any) -> bool:
    """Whether an operator modifies no argument, and returns no view of one."""
    schema = func._schema
    return all(value.alias_info is None for value in (*schema.arguments, *schema.returns))
