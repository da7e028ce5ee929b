"""Autocast: finds out, by asking torch, which arguments of an op ``torch.autocast`` casts.

Torch has no table of its rules, but a dispatch mode shows which kernels an op runs, in which
dtypes. A cast of the arguments is that of autocast if the op, with this cast and without autocast,
runs the same kernels in the same dtypes; so for composite ops, whose inner ops are cast, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.fx.experimental.proxy_tensor import PreDispatchTorchFunctionMode
from torch.fx.node import has_side_effect
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICES = ("cpu", "cuda")


def active() -> tuple[Autocast, ...]:
    """The autocasts that are on, by device."""
    found = (device for device in DEVICES if torch.is_autocast_enabled(device))
    return tuple(Autocast(device, torch.get_autocast_dtype(device)) for device in found)


@contextmanager
def marked_changes() -> Iterator[list[tuple[Autocast, ...]]]:
    """While a model is traced, each change of autocast is a call of ``MARK`` in the program.

    Otherwise torch would trace a block of autocast as a program of its own, and would lose
    ``torch.no_grad()`` inside of the block.

    Yields a list of the autocasts after each change; the argument of a ``MARK`` is an index in it.
    """
    changes: list[tuple[Autocast, ...]] = []
    before = PreDispatchTorchFunctionMode.__torch_function__

    def recorded(self: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (_enter_autocast, _exit_autocast):
            return before(self, func, types, args, kwargs)
        node = self.tracer.create_node("call_function", MARK, (len(changes),), {})
        node.meta["val"] = None
        changes.append(active())
        return node

    with patch.object(PreDispatchTorchFunctionMode, "__torch_function__", recorded):
        yield changes


@contextmanager
def entered(autocasts: Iterable[Autocast]) -> Iterator[None]:
    """Inside this context, exactly these autocasts are on."""
    with no_autocast(), ExitStack() as stack:
        for autocast in autocasts:
            stack.enter_context(autocast.entered())
        yield


@contextmanager
def no_autocast() -> Iterator[None]:
    """Inside this context, no autocast is on."""
    with ExitStack() as stack:
        for autocast in active():
            stack.enter_context(torch.autocast(autocast.device, enabled=False))
        yield


@dataclass(frozen=True)
class Autocast:
    """``torch.autocast`` for a device type and a narrow dtype."""

    device: str
    dtype: torch.dtype

    def entered(self) -> AbstractContextManager[Any]:
        """A context in which torch casts by itself."""
        return torch.autocast(self.device, self.dtype, cache_enabled=False)

    def cast_of(
        self, op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> torch.dtype | None:
        """The dtype to which this autocast casts an op's arguments; None if it does not cast them.

        Tensors among the arguments have no values.

        Raises:
            LookupError: the effect of autocast is not a cast of the arguments to one dtype.
        """
        if not _ASKED_NOTHING.isdisjoint(op.tags):
            return None
        key = (self, op, pytree.tree_map(_form, (tuple(args), kwargs)))
        known = str(key)
        if known not in _KNOWN:
            with self.entered():
                wanted = _calls(op, args, kwargs)
            for dtype in (None, self.dtype, torch.float32):
                # Without the cast, an op may refuse tensors of different dtypes.
                with no_autocast(), suppress(RuntimeError):
                    if _calls(op, *_cast(dtype, (args, kwargs))) == wanted:
                        _KNOWN[known] = dtype
                        break
            else:
                raise LookupError
        return _KNOWN[known]


_ASKED_NOTHING = {torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output}
"""Tags of ops that return indices or numbers, which need values; autocast casts none of them."""

_KNOWN: dict[str, torch.dtype | None] = {}
"""Results of ``cast_of`` so far, by the form of the call."""


def is_cast(tensor: Tensor, dtype: torch.dtype) -> bool:
    """Whether autocast to ``dtype`` changes a tensor; it leaves float64 alone."""
    return tensor.is_floating_point() and tensor.dtype not in (dtype, torch.float64)


def _cast(dtype: torch.dtype | None, values: Any) -> Any:
    def one(value: Any) -> Any:
        if dtype is not None and isinstance(value, Tensor) and is_cast(value, dtype):
            return value.to(dtype)
        return value

    return pytree.tree_map(one, values)


def _form(value: Any) -> Any:
    """The properties of an argument that decide on casts; for a tensor, not its sizes."""
    return (value.dtype, value.ndim, value.device) if isinstance(value, Tensor) else value


def _calls(op: OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    with torch.no_grad(), _Recorder() as recorder:
        made = op(*args, **kwargs)
    return [*recorder.calls, _dtypes(made)]


def _dtypes(values: Any) -> list[torch.dtype]:
    return [x.dtype for x in pytree.tree_leaves(values) if isinstance(x, Tensor)]


_MOVES = ("aten._to_copy", "aten.clone", "aten._unsafe_view")
"""Casts, and ops that only move elements; a cast before or after these gives the same result."""


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the kernels that compute something, with the dtypes of their tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        # Autocast asks every argument for its device, by an op of the namespace prim.
        if not (func.is_view or func.namespace == "prim" or str(func).startswith(_MOVES)):
            self.calls.append((str(func), _dtypes((args, kwargs, made))))
        return made


torch.library.define("superscaler::autocast", "(int number) -> ()")
MARK = torch.ops.superscaler.autocast.default
"""An op in a traced program: from its call on, the autocasts are those with its number."""
has_side_effect(MARK)
