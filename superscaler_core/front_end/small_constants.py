"""Small constants: a value computed from constants alone is a constant, unless it is large.

A large one, such as a causal mask over a long sequence, is computed by ops, which are cut.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from superscaler_core.graph.tensor import ITEM_BYTES
from superscaler_core.rules.records import Node
from superscaler_core.rules.table import has_rule

LIMIT_BYTES = 1 << 26
"""Limit for a constant that is computed at the capture, unless its operands are as large.

Below the limit a constant is better: every pipeline stage has a copy, but would be sent a result.
"""

_SMALL = 1 << 16
"""Bytes up to which a constant is kept as it is, even if its elements repeat."""

_FILLS = ("full", "zeros", "ones")
_FILLED = {f"aten.{form.format(name)}" for name in _FILLS for form in ("{}", "{}_like", "new_{}")}
"""Calls that make a tensor of one value."""

_UNSET = {"aten.empty", "aten.empty_like", "aten.new_empty", "aten.empty_strided",
          "aten.new_empty_strided", "aten.empty_permuted"}  # fmt: skip
"""Calls that make a tensor of no value."""


def is_folded(node: Node, read: Sequence[Tensor]) -> bool:
    """Whether a call that reads these constants is computed at the capture; if not, it is an op."""
    sizes = (_num_bytes(_distinct(node, v.shape, read), v.dtype) for v in node.outputs)
    made = max(sizes, default=0)
    known = {id(tensor): _compact(tensor).nbytes for tensor in read}
    is_small = made <= max(LIMIT_BYTES, sum(known.values()))
    return is_small or not known or not has_rule(node)


def run_small(node: Node, args: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The results of a call of constants; elements that repeat are computed and kept once."""
    if node.base in _UNSET:
        # Whatever is in the memory would be a constant, another one on every rank.
        zero = (torch.zeros((), dtype=getattr(torch, v.dtype)) for v in node.outputs)
        return tuple(x.expand(v.shape) for x, v in zip(zero, node.outputs, strict=True))
    if all(_num_bytes(v.shape, v.dtype) <= _SMALL for v in node.outputs):
        return node.run(args)
    if node.base in _FILLED:
        small = {name: [] if name == "size" else arg for name, arg in args.items()}
        if "self" in small:
            small["self"] = torch.zeros((), dtype=small["self"].dtype)
        return _expanded(node, node.run(small))
    tensors = [arg for arg in args.values() if isinstance(arg, Tensor)]
    if not node.is_pointwise or len(node.outputs) != 1:
        return node.run(args)
    shape = _distinct(node, node.outputs[0].shape, tensors)
    return _expanded(node, node.run({name: _first(arg, shape) for name, arg in args.items()}))


def _expanded(node: Node, results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    return tuple(x.expand(v.shape) for x, v in zip(results, node.outputs, strict=True))


def _distinct(node: Node, shape: Sequence[int], read: Sequence[Tensor]) -> tuple[int, ...]:
    """The shape of a result, with 1 for dims along which a pointwise call repeats its elements."""
    if not node.is_pointwise:
        return tuple(shape)
    own = [_compact(tensor).shape for tensor in read]
    # The dims of tensors are aligned at the last one.
    rows = [[1] * (len(shape) - len(s)) + [*s] for s in own]
    columns = zip(shape, zip(*rows, strict=True), strict=True)
    return tuple(min(size, max(column)) for size, column in columns)


def _first(arg: Any, shape: Sequence[int]) -> Any:
    """The first elements of a tensor along the dims of size 1 in ``shape``, where it repeats."""
    if not isinstance(arg, Tensor):
        return arg
    sizes = shape[len(shape) - arg.dim() :]
    return arg[tuple(slice(0, min(n, size)) for n, size in zip(arg.shape, sizes, strict=True))]


def compact(value: Tensor) -> Tensor:
    """The constant to keep for a value: large values are kept without their repetitions."""
    if value.nbytes <= _SMALL:
        return value
    found = _compact(value)
    for dim in range(found.dim()) if not found.is_meta else ():
        first = found.narrow(dim, 0, 1)
        if torch.equal(found, first.expand_as(found)):
            found = first
    return found


def _compact(value: Tensor) -> Tensor:
    strides = zip(value.shape, value.stride(), strict=True)
    return value[tuple(slice(0, 1 if stride == 0 and size else size) for size, stride in strides)]


def _num_bytes(shape: Iterable[int], dtype: str) -> int:
    return prod(shape) * ITEM_BYTES.get(dtype, 8)
