"""Piece: a piece of memory with the number of its holders, and how tensors lie in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage


class MemoryPool:
    """A memory.

    Attributes:
        now_bytes: bytes of its pieces.
    """

    def __init__(self) -> None:
        self.now_bytes = 0


class MemoryPiece:
    """A piece of memory, which is freed when nobody holds it.

    Args:
        num_bytes: its size.
        pool: the memory that it is in; None if it is not counted.

    Attributes:
        copy: the copy of it in host memory, which lives at least as long.
    """

    __slots__ = ("_holders", "_pool", "copy", "num_bytes")

    def __init__(self, num_bytes: int, pool: MemoryPool | None) -> None:
        self.num_bytes, self._pool, self._holders = num_bytes, pool, 0
        self.copy: MemoryPiece | None = None
        if pool is not None:
            pool.now_bytes += num_bytes

    def hold(self) -> MemoryPiece:
        """Add a holder."""
        self._holders += 1
        return self

    def release(self) -> None:
        """Remove a holder."""
        self._holders -= 1
        if self._holders:
            return
        if self._pool is not None:
            self._pool.now_bytes -= self.num_bytes
        if self.copy is not None:
            self.copy.release()

    def copied(self, pool: MemoryPool) -> MemoryPiece:
        """Its copy in another memory, which is made once."""
        if self.copy is None:
            self.copy = MemoryPiece(self.num_bytes, pool).hold()
        return self.copy


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

    @property
    def num_bytes(self) -> int:
        """Bytes of the elements."""
        return prod(self.shape) * self.dtype.itemsize

    def on(self, storage: UntypedStorage) -> Tensor:
        """A tensor of this form in a storage."""
        empty = torch.empty(0, dtype=self.dtype, device="meta")
        return empty.set_(storage, self.offset, self.shape, self.stride)


class Located(NamedTuple):
    """A tensor: its form, and the piece of memory that it lies in."""

    piece: MemoryPiece
    form: Strided


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

    @classmethod
    def of(cls, given: Sequence[Located | None]) -> Layouts:
        """The layouts of these tensors; pieces are numbered in the order of their first tensors."""
        numbers: dict[MemoryPiece, int] = {}
        lying = (
            None if x is None else Lying(numbers.setdefault(x.piece, len(numbers)), x.form)
            for x in given
        )
        return cls(tuple(lying), tuple(piece.num_bytes for piece in numbers))

    def made(self) -> list[Tensor | None]:
        """New tensors with these layouts, without data."""
        storages = [
            torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            for size in self.sizes
        ]
        return [None if x is None else x.form.on(storages[x.number]) for x in self.tensors]
