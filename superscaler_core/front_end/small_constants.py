"""Small constants: what a program computes from constants alone remains a rule where it is large.

A causal mask compares positions with positions. Folded, it would be a constant of the square of the
sequence; as ops over positions it costs a device little, and it is cut like everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from superscaler_core.front_end.records import Node
from superscaler_core.front_end.rules.table import has_rule
from superscaler_core.graph.tensor import ITEM_BYTES

LIMIT_BYTES = 1 << 16
"""Of a constant that is computed at the capture, unless what it is computed from is as large."""

_FILLS = ("full", "zeros", "ones")
_FILLED = {f"aten.{form.format(name)}" for name in _FILLS for form in ("{}", "{}_like", "new_{}")}
"""Calls that make a tensor of one value."""


def is_folded(node: Node, read: Iterable[Tensor]) -> bool:
    """Whether a call of constants is computed at the capture; if not, it is an op.

    Args:
        node: the call.
        read: its tensors.
    """
    made = max((_num_bytes(value.shape, value.dtype) for value in node.outputs), default=0)
    known = {id(tensor): _compact(tensor).nbytes for tensor in read}
    is_small = made <= max(LIMIT_BYTES, sum(known.values()))
    return is_small or not known or not has_rule(node)


def run_small(node: Node, args: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """The results of a call of constants; one value that fills a large tensor is kept once."""
    if (
        node.base not in _FILLED
        or _num_bytes(node.outputs[0].shape, node.outputs[0].dtype) <= LIMIT_BYTES
    ):
        return node.run(args)
    small = {name: [] if name == "size" else arg for name, arg in args.items()}
    if "self" in small:
        small["self"] = torch.zeros((), dtype=small["self"].dtype)
    (filling,) = node.run(small)
    return (filling.expand(node.outputs[0].shape),)


def compact(value: Tensor) -> Tensor:
    """The constant to keep for a value: of a large one that repeats, each repeated element once."""
    return value if value.nbytes <= LIMIT_BYTES else _compact(value)


def _compact(value: Tensor) -> Tensor:
    strides = zip(value.shape, value.stride(), strict=True)
    return value[tuple(slice(0, 1 if stride == 0 and size else size) for size, stride in strides)]


def _num_bytes(shape: Iterable[int], dtype: str) -> int:
    found = ITEM_BYTES.get(dtype, 8)
    for size in shape:
        found *= size
    return found
