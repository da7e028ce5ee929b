"""Meta: tensors without data: how they lie in memory, and operators that run on them."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache, lru_cache
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 - as everybody writes it
from torch import Tensor, UntypedStorage
from torch.overrides import TorchFunctionMode

from superscaler_core.known import Known
from superscaler_core.training.live_bytes import StorageMeter, tensors_of

Index = tuple[tuple[int, int], ...] | None
"""A box of a tensor; None for all of it."""


class Strided(NamedTuple):
    """A tensor in a piece of memory.

    Attributes:
        shape, stride, offset, dtype: properties of the tensor.
        is_trained: whether the tensor requires a gradient.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    is_trained: bool = False

    @classmethod
    def of(cls, x: Tensor) -> Strided:
        """The form of a tensor."""
        offset = int(x.storage_offset())
        return cls(tuple(x.shape), x.stride(), offset, x.dtype, x.requires_grad)

    @staticmethod
    @lru_cache(maxsize=1 << 14)
    def new(shape: tuple[int, ...], dtype: str, *, is_trained: bool = False) -> Strided:
        """The form of a new tensor, which fills its piece."""
        stride = [1]
        for size in shape[:0:-1]:
            stride.append(stride[-1] * max(1, size))
        strides = tuple(stride[::-1] if shape else ())
        return Strided(shape, strides, 0, getattr(torch, dtype), is_trained)

    def within(self, index: Index) -> Strided:
        """The form of a box of the tensor, which lies in the same memory."""
        if index is None:
            return self
        shape = tuple(hi - lo for lo, hi in index)
        offset = sum(lo * step for (lo, _), step in zip(index, self.stride, strict=True))
        return self._replace(shape=shape, offset=self.offset + offset)

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    def on(self, storage: UntypedStorage) -> Tensor:
        """A tensor of this form in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device="meta")
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Lying(NamedTuple):
    """How a tensor lies among several pieces of memory: the number of its piece, and its form."""

    number: int
    form: Strided


class Layouts(NamedTuple):
    """How several tensors lie, and which of them share memory.

    Attributes:
        tensors: the layout of each tensor; None where there is none.
        sizes: bytes of each piece of memory.
    """

    tensors: tuple[Lying | None, ...]
    sizes: tuple[int, ...]

    def made(self) -> list[Tensor | None]:
        """New tensors with these layouts, without data."""
        storages = [
            torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            for size in self.sizes
        ]
        return [None if x is None else x.form.on(storages[x.number]) for x in self.tensors]


# --- operators ----------------------------------------------------------------------------------

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


class FusedAttention(TorchFunctionMode):
    """Replaces attention by the fused kernel of real devices, which torch does not use on meta."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is F.scaled_dot_product_attention:
            return _attention(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    *,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    is_fused = q.dim() == 4 and q.shape[-1] == v.shape[-1] and q.shape[1] == k.shape[1]
    if not is_fused or (mask is not None and mask.requires_grad):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa
        )
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=q.dtype).masked_fill(mask, 0.0)
    fused = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    result: Tensor = fused(q, k, v, 0.0, is_causal, attn_mask=mask, scale=scale)[0]
    return result
