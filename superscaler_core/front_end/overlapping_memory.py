"""Overlapping memory: refuses tensors of a model that overlap, which only torch would train."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from superscaler_core.errors import CaptureError
from superscaler_core.grouped import grouped


def check_apart(parameters: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> None:
    """Refuse a parameter that shares memory with another tensor, which a program would not update.

    Args:
        parameters: by name, each once: a tied parameter is one tensor.
        others: other tensors that the model reads, by name.

    Raises:
        CaptureError: two tensors overlap (the message names both), or a parameter has no shape yet.
    """
    named = [*parameters.items(), *others.items()]
    if lazy := [name for name, tensor in named if is_lazy(tensor)]:
        raise CaptureError(f"{lazy[0]!r} has no shape yet: call the model once before its capture.")
    held = ((name, x) for name, x in named if x.layout is torch.strided and x.numel())
    for tensors in grouped((x.untyped_storage()._cdata, (name, x)) for name, x in held).values():
        for (one, a), (other, b) in combinations(tensors, 2):
            if {one, other} & parameters.keys() and a is not b and _overlap(a, b):
                raise CaptureError(
                    f"{one!r} and {other!r} share memory but are two tensors, so that only one of "
                    "them would change; register one parameter under both names, or compute the "
                    "other in the forward."
                )


def _overlap(one: Tensor, other: Tensor) -> bool:
    (a, b), (c, d) = _bytes(one), _bytes(other)
    return a < d and c < b


def _bytes(tensor: Tensor) -> tuple[int, int]:
    """The half-open range of bytes that a tensor spans in its storage."""
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * tensor.itemsize, (first + int(last) + 1) * tensor.itemsize
