"""Containers: arguments in plain dicts, lists and tuples, which alone tracing sees, and back.

Dataclasses, mappings such as a tokenizer's ``UserDict``, and namespaces are opened and closed.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from superscaler_core.errors import CaptureError

_LEAVES = (Tensor, bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device,
           torch.layout, torch.memory_format)  # fmt: skip


def opened(value: Any) -> Any:
    """A value in plain containers; arrays of numpy are tensors of the same memory.

    Law (tests/superscaler_core/front_end/test_containers.py): ``closed(opened(x), x)`` has the
    types and the values of ``x``, but tensors in place of arrays.
    """
    # Each step opens its arguments, so that the usual kinds come first.
    if isinstance(value, Tensor):
        return value
    if type(value) is dict:
        return {key: opened(part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(opened, value))
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value if value.flags.writeable else value.copy())
    if isinstance(value, np.generic):
        return value.item()
    items = _items(value)
    if items is not None:
        return {key: opened(part) for key, part in items.items()}
    children, form = _level(value)
    return value if form is None else pytree.tree_unflatten(map(opened, children), form)


def closed(plain: Any, like: Any) -> Any:
    """A value with the types of ``like``, of which ``opened`` made ``plain``, and other tensors."""
    items = _items(like)
    if items is not None:
        parts = {key: closed(plain[key], part) for key, part in items.items()}
        return _with_items(like, parts)
    children, form = _level(like)
    if form is None:
        return plain
    pairs = zip(_level(plain)[0], children, strict=True)
    return pytree.tree_unflatten((closed(own, child) for own, child in pairs), form)


def check_arguments(named: Mapping[str, Any]) -> None:
    """Refuse arguments that cannot be opened.

    Raises:
        CaptureError: an argument contains an object of another class; the message names both.
    """
    for name, value in named.items():
        for leaf in [value] if isinstance(value, Tensor) else pytree.tree_leaves(value):
            if not isinstance(leaf, _LEAVES):
                raise CaptureError(
                    f"argument {name!r} contains a {type(leaf).__name__}; a step takes tensors, "
                    "arrays, numbers and texts, in lists, tuples, dicts, dataclasses and mappings."
                )


def _items(value: Any) -> dict[Any, Any] | None:
    """The parts of a container that is no plain one, by their names; None for another value."""
    if not pytree.tree_is_leaf(value) or isinstance(value, type):
        return None
    if is_dataclass(value):
        return {f.name: getattr(value, f.name) for f in fields(value) if hasattr(value, f.name)}
    if isinstance(value, SimpleNamespace):
        return dict(vars(value))
    return dict(value) if isinstance(value, Mapping) else None


def _with_items(like: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(like, MappingProxyType):
        return MappingProxyType(parts)
    made = copy.copy(like)
    if isinstance(like, Mapping):
        data = getattr(made, "data", None)
        if isinstance(data, dict):  # a UserDict, whose copy may share its dict
            made.data = parts
        else:
            made.update(parts)
        return made
    for name, part in parts.items():
        object.__setattr__(made, name, part)
    return made


def _level(value: Any) -> tuple[list[Any], Any]:
    """The parts of a plain container, and its form; the form of a leaf is None."""
    if pytree.tree_is_leaf(value):
        return [], None
    return pytree.tree_flatten(value, is_leaf=lambda part: part is not value)
