"""Reader: reads boxes of stored tensors as ranges of bytes, and no other data."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rvdcomm.checkpoint.archive import locate
from rvdcomm.checkpoint.files import Folder
from rvdcomm.checkpoint.stored import Block, StoredTensor
from rvdcomm.errors import CheckpointError
from rvdcomm.layout import ITEM_BYTES, Box
from rvdcomm.run import add_into

MAX_READ_BYTES = 1 << 30
"""The most bytes that one system call is asked for; Linux reads no more than 2 GiB at once."""


def runs(box: Box, outer: Box) -> Iterator[tuple[int, int]]:
    """Offset and length, in elements, of the contiguous pieces of ``box`` in a row-major ``outer``.

    Laws (tests/checkpoint/test_windows.py): the pieces in order are the elements of the box in
    row-major order; a box of ``windows(outer.shape, n)`` is one piece.

    >>> list(runs(Box((0, 1), (2, 3)), Box((0, 0), (2, 4))))
    [(1, 2), (5, 2)]
    """
    if box.is_empty:
        return
    shape, extents = box.shape, outer.shape
    d = len(shape)
    while d and shape[d - 1] == extents[d - 1]:
        d -= 1
    # Dims from d on are whole. A piece extends along dim d - 1; each index of the dims before that
    # has a piece of its own.
    cut = max(d - 1, 0)
    strides = [prod(extents[k + 1 :]) for k in range(len(extents))]
    first = sum((a - b) * s for a, b, s in zip(box.lo, outer.lo, strides, strict=True))
    length = prod(shape[cut:])
    for index in np.ndindex(*shape[:cut]):
        yield first + sum(i * s for i, s in zip(index, strides, strict=False)), length


@dataclass
class _Digest:
    """The checksum of the first ``position`` bytes of a block, which were read without gaps."""

    position: int = 0
    hash: Any = field(default_factory=hashlib.sha256)


class Reader:
    """Reads boxes of the tensors of the checkpoint in a folder, and counts what it reads.

    Attributes:
        num_bytes_read: bytes of tensors, by file. Headers and descriptions are not counted.
    """

    def __init__(self, folder: Folder) -> None:
        self.folder = folder
        self.num_bytes_read: dict[str, int] = {}
        self._digests: dict[Block, _Digest] = {}
        self._elements = lru_cache(maxsize=1024)(partial(locate, folder))

    def gather(self, tensor: StoredTensor, box: Box, out: Tensor, scratch: memoryview) -> None:
        """Read ``box`` of a tensor into ``out``; its value parts are summed in ascending order.

        Args:
            tensor: a tensor of this checkpoint.
            box: the box to read.
            out: contiguous, ``[*box.shape]``.
            scratch: as many bytes as ``out``; unused where a block is read straight into ``out``.
        """
        for block in tensor.chosen:
            common = block.box.intersect(box)
            if common is None:
                continue
            order = self._order(tensor, block)
            if common == box and block.part == 0 and order == sorted(order):
                self._read(tensor, block, common, bytes_of(out))
                continue
            piece = scratch[: common.num_elements * out.itemsize]
            self._read(tensor, block, common, piece)
            stored = tensor_of(piece, out.dtype, tuple(common.shape[d] for d in order))
            found = stored.permute([order.index(d) for d in range(len(order))])
            target = out[common.slices_within(box)]
            if block.part:
                add_into(target, found)
            else:
                target.copy_(found)

    def check(self, tensor: StoredTensor) -> None:
        """Verify the checksums of those blocks of a tensor that were read from start to end.

        Raises:
            CheckpointError: the bytes of a block are not those that were written.
        """
        for block in tensor.chosen:
            digest = self._digests.pop(block, None)
            if digest is None or digest.position != block.num_bytes:
                continue
            if digest.hash.hexdigest() != block.sha256:
                raise CheckpointError(
                    f"{self.folder.root / block.file}: the {block.num_bytes} bytes of tensor "
                    f"{tensor.name!r} {block.box} are damaged: their sha256 is "
                    f"{digest.hash.hexdigest()[:12]}..., it was {str(block.sha256)[:12]}... when "
                    "they were written; copy the file again."
                )

    def _order(self, tensor: StoredTensor, block: Block) -> list[int]:
        if not block.is_archive:
            return list(range(len(block.box.lo)))
        return list(self._elements(block, tensor.dtype).order)

    def _read(self, tensor: StoredTensor, block: Block, box: Box, out: memoryview) -> None:
        """Fill ``out`` with ``box`` in the order in which the block stores its elements."""
        start, inner, outer = block.start, box, block.box
        if block.is_archive:
            elements = self._elements(block, tensor.dtype)
            start, inner, outer = (
                elements.start,
                *(_permuted(b, elements.order) for b in (box, outer)),
            )
        item_bytes = ITEM_BYTES[tensor.dtype]
        filled = 0
        with self.folder.open(block.file) as file:
            for offset, length in runs(inner, outer):
                piece = out[filled : filled + length * item_bytes]
                self._fill(block, file.fileno(), start + offset * item_bytes, piece)
                self._feed(block, offset * item_bytes, piece)
                filled += length * item_bytes
        count = self.num_bytes_read.get(block.file, 0)
        self.num_bytes_read[block.file] = count + filled

    def _fill(self, block: Block, descriptor: int, start: int, out: memoryview) -> None:
        while out:
            num_bytes = os.preadv(descriptor, [out[:MAX_READ_BYTES]], start)
            if num_bytes == 0:
                raise CheckpointError(
                    f"{self.folder.root / block.file} ends at byte {start}, where {len(out)} more "
                    "bytes were expected; it was cut off or changed while it was read."
                )
            out, start = out[num_bytes:], start + num_bytes

    def _feed(self, block: Block, offset: int, data: memoryview) -> None:
        """Add data to the block's checksum if it directly follows the data added before."""
        if block.sha256 is None:
            return
        digest = self._digests.setdefault(block, _Digest())
        if digest.position == offset:
            digest.hash.update(data)
            digest.position += len(data)


def _permuted(box: Box, order: tuple[int, ...]) -> Box:
    return Box(tuple(box.lo[d] for d in order), tuple(box.hi[d] for d in order))


def tensor_of(data: memoryview, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """A tensor ``[*shape]`` on this memory, which must have exactly the tensor's size."""
    if not data:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor on the CPU."""
    # Strides of a tensor of one element, or of none, may be anything; a view as bytes needs 1.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data
