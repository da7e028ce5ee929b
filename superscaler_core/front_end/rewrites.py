"""Rewrites: functions of torch that a model may call, in a form that tracing can follow.

While a model is traced, a call of one is the call of its replacement, of equal value and gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

# At run time this is a descriptor, which its declared type does not say.
DATA: Any = Tensor.data


def _data(x: Tensor, _: type[Any] | None = None) -> Tensor:
    """``x.data``, where nobody looks at versions."""
    return x.detach()


def _random(x: Tensor, *bounds: int, **named: Any) -> Tensor:
    """``x.random_(from, to)``; torch writes the name ``from`` into a program, which is no name."""
    bounds = (*bounds, *(named.pop(name) for name in ("from", "to") if name in named))
    low, high = bounds[0], bounds[1]
    return x.random_(high - low, **named).add_(low)


def _fill_diagonal(x: Tensor, fill_value: float, wrap: bool = False) -> Tensor:
    """``x.fill_diagonal_``, which has no form that returns a new tensor."""
    shape = [*x.shape]
    rows, columns = (torch.arange(n, device=x.device) for n in (shape[0], shape[-1]))
    is_at = rows[:, None] % (shape[1] + 1) if wrap and x.dim() == 2 else rows[:, None]
    is_on: Tensor = is_at == columns
    for size in shape[1:-1]:
        # A tensor of several dims is a cube: its diagonal is where all indices are equal.
        is_on = is_on[:, None] & (rows[:, None] == torch.arange(size, device=x.device))[..., None]
    return x.copy_(x.masked_fill(is_on, fill_value))


def _one_by_one(method: Callable[..., Any]) -> Callable[..., None]:
    """A method that writes in place, on every tensor of a list."""

    def run(tensors: Sequence[Tensor], *given: Any, **named: Any) -> None:
        for i, tensor in enumerate(tensors):
            method(tensor, *(x[i] if isinstance(x, list | tuple) else x for x in given), **named)

    return run


_LISTED = ("add", "sub", "mul", "div", "lerp", "copy")

_RANDOM: Any = Tensor.random_
_DIAGONAL: Any = Tensor.fill_diagonal_

REWRITES: Mapping[Callable[..., Any], Callable[..., Any]] = {
    DATA.__get__: _data,
    _DIAGONAL: _fill_diagonal,
    **{
        getattr(torch, f"_foreach_{name}_"): _one_by_one(getattr(Tensor, f"{name}_"))
        for name in _LISTED
    },
}


def rewritten(func: Callable[..., Any], args: Any, kwargs: Mapping[str, Any]) -> Any:
    """The result of a call, computed by its replacement if it has one."""
    if func is _RANDOM and len(args) + len(kwargs.keys() & {"from", "to"}) > 2:
        return _random(*args, **kwargs)
    return REWRITES.get(func, func)(*args, **kwargs)
