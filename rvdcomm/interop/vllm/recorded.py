"""CheckpointTensor: a tensor of a checkpoint that is not here, for loaders that copy views of it.

A loader of vLLM takes whole tensors of a checkpoint, narrows them to what its worker needs, and
copies that into a parameter. Given tensors without data it does the same, and each copy says where
the data belong. Everything else that a loader may do to a tensor (arithmetic, reading a value)
needs the data, and raises ``NotRecordedError``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from rvdcomm import LayoutError
from rvdcomm.interop.vllm.window import Window

_ATEN = torch.ops.aten
_SAME_ELEMENTS = (_ATEN.clone.default, _ATEN.detach.default, _ATEN.alias.default)
"""Ops whose result has the elements of their argument, in the same places."""

_VIEWS = frozenset(
    {
        _ATEN._unsafe_view.default,
        _ATEN.diagonal.default,
        _ATEN.expand.default,
        _ATEN.permute.default,
        _ATEN.select.int,
        _ATEN.slice.Tensor,
        _ATEN.split.Tensor,
        _ATEN.split_with_sizes.default,
        _ATEN.squeeze.default,
        _ATEN.squeeze.dim,
        _ATEN.squeeze.dims,
        _ATEN.t.default,
        _ATEN.transpose.int,
        _ATEN.unbind.int,
        _ATEN.unfold.default,
        _ATEN.unsqueeze.default,
        _ATEN.view.default,
    }
)
"""Views whose elements follow from the shape of their argument alone.

Others need its data or its strides, which a copy may have changed: ``view(dtype)``, ``as_strided``.
"""


class NotRecordedError(Exception):
    """A loader did something to a tensor of the checkpoint that needs its data."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(f"{name}: {reason}")
        self.name, self.reason = name, reason


class Reader(Protocol):
    """What a copy from a ``CheckpointTensor`` into a parameter does."""

    def copy(self, dst: Tensor, src: CheckpointTensor) -> None:
        """Note that ``dst`` gets the values of ``src``, or let it get them."""

    def refuse(self, error: NotRecordedError) -> None:
        """Note an error that is raised; a loader may go on after it."""


class CheckpointTensor(Tensor):
    """A view of the tensor ``entry`` of a checkpoint, without its data.

    ``address`` is the same view of a whole tensor, whose shape is ``whole_shape``, on the device
    ``meta``. ``dtypes`` are the dtypes to which values are converted in turn, the checkpoint's
    first.
    """

    entry: str
    whole_shape: tuple[int, ...]
    address: Tensor
    dtypes: tuple[torch.dtype, ...]
    reader: Reader

    @staticmethod
    def __new__(
        cls,
        entry: str,
        whole_shape: tuple[int, ...],
        address: Tensor,
        dtypes: tuple[torch.dtype, ...],
        device: torch.device,
        reader: Reader,
    ) -> CheckpointTensor:
        made: CheckpointTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            address.shape,
            strides=address.stride(),
            storage_offset=address.storage_offset(),
            dtype=dtypes[-1],
            device=device,
            requires_grad=False,
        )
        made.entry, made.whole_shape = entry, whole_shape
        made.address, made.dtypes, made.reader = address, dtypes, reader
        return made

    @classmethod
    def whole(
        cls,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        reader: Reader,
    ) -> CheckpointTensor:
        """The whole tensor ``name``."""
        address = torch.empty(tuple(shape), dtype=torch.uint8, device="meta")
        return cls(name, tuple(shape), address, (dtype,), device, reader)

    @property
    def window(self) -> Window:
        """The elements that this view sees.

        Raises:
            NotRecordedError: the view is no box with steps.
        """
        at = self.address
        try:
            return Window.of(self.whole_shape, at.shape, at.stride(), int(at.storage_offset()))
        except LayoutError as error:
            self._refuse(str(error))

    def _refuse(self, reason: str) -> NoReturn:
        error = NotRecordedError(self.entry, reason)
        self.reader.refuse(error)
        raise error

    def __deepcopy__(self, memo: Any) -> CheckpointTensor:
        return self._viewed(self.address)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"CheckpointTensor({self.entry!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        source = next(each for each in _leaves(args) if isinstance(each, cls))
        if func is _ATEN.copy_.default and args[0] is not source:
            source.reader.copy(args[0], source)
            return args[0]
        if args[0] is source:
            if func is _ATEN._to_copy.default:
                return source._converted(kwargs)
            if func in _SAME_ELEMENTS:
                return source._viewed(source.address)
            if func in _VIEWS:
                return source._through(func, args[1:], kwargs)
        source._refuse(f"its loader calls {func}")

    def _through(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """The result of a view op, taken of the address."""
        try:
            found = func(self.address, *args, **kwargs)
        except RuntimeError as error:  # A view of what a copy would have made contiguous.
            self._refuse(str(error).splitlines()[0])
        return tree_map(lambda x: self._viewed(x) if isinstance(x, Tensor) else x, found)

    def _viewed(self, address: Tensor) -> CheckpointTensor:
        return CheckpointTensor(
            self.entry, self.whole_shape, address, self.dtypes, self.device, self.reader
        )

    def _converted(self, kwargs: Mapping[str, Any]) -> CheckpointTensor:
        """The result of ``to``; memory of another device or form is the reader's business."""
        dtype = kwargs.get("dtype") or self.dtype
        dtypes = self.dtypes if dtype == self.dtype else (*self.dtypes, dtype)
        device = torch.device(kwargs.get("device") or self.device)
        return CheckpointTensor(
            self.entry, self.whole_shape, self.address, dtypes, device, self.reader
        )


def _leaves(args: Sequence[Any]) -> list[Any]:
    """The arguments of an op, those in lists included."""
    found: list[Any] = []
    for each in args:
        found += _leaves(each) if isinstance(each, list | tuple) else [each]
    return found
