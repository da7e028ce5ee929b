"""Reader: reads boxes of stored tensors as ranges of bytes, and no other data."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache, partial
from math import prod

import numpy as np
import torch
from torch import Tensor

from rvdcomm.checkpoint.archive import locate
from rvdcomm.checkpoint.checked import Checked, Damage, checked
from rvdcomm.checkpoint.faults import naming
from rvdcomm.checkpoint.folder import Folder
from rvdcomm.checkpoint.stored import Extent, StoredTensor
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


class Reader:
    """Reads boxes of the tensors of the checkpoint in a folder, and counts what it reads.

    Args:
        folder: the folder of the checkpoint.
        verify: compare checksums (``checked``), which reads whole blocks.

    Attributes:
        num_bytes_read: bytes of tensors, by file. Headers and descriptions are not counted.
    """

    def __init__(self, folder: Folder, *, verify: bool = True) -> None:
        self.folder, self.verify = folder, verify
        self.num_bytes_read: dict[str, int] = {}
        self._checked: dict[Extent, Checked] = {}
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
            extent, target = block.extent, out[common.slices_within(box)]
            if extent is None:
                if block.part == 0:
                    target.zero_()
                continue
            order = self._order(extent, tensor.dtype)
            dims = [d for s in order if (d := block.dims[s]) is not None]
            stored = _permuted(block.stored(common), order)
            if common == box and block.part == 0 and dims == sorted(dims):
                self._read(tensor, extent, stored, bytes_of(out))
                continue
            piece = scratch[: common.num_elements * out.itemsize]
            self._read(tensor, extent, stored, piece)
            found = _in_dims(
                tensor_of(piece, out.dtype, tuple(common.shape[d] for d in dims)), dims, common
            )
            if block.part:
                add_into(target, found)
            else:
                target.copy_(found)

    def check(self, tensor: StoredTensor) -> None:
        """Verify the checksums of what was read of a tensor and is not yet verified.

        Raises:
            CheckpointError: bytes are not those that were written.
        """
        for block in tensor.chosen:
            extent = block.extent
            if extent is not None and (found := self._checked.pop(extent, None)) is not None:
                with self._naming(tensor, extent), self.folder.open(extent.file) as file:
                    found.finish(partial(self._fill, extent, file.fileno(), extent.start))

    def _order(self, extent: Extent, dtype: str) -> tuple[int, ...]:
        """The dims of an array in the order of its file, outermost first."""
        if not extent.is_archive:
            return tuple(range(len(extent.shape)))
        return self._elements(extent, dtype).order

    def _read(self, tensor: StoredTensor, extent: Extent, box: Box, out: memoryview) -> None:
        """Fill ``out`` with a box of the array, in the order in which the file has its elements."""
        start = extent.start
        if extent.is_archive:
            start = self._elements(extent, tensor.dtype).start
        outer = _permuted(Box.of_shape(extent.shape), self._order(extent, tensor.dtype))
        item_bytes = ITEM_BYTES[tensor.dtype]
        checksum = extent.checksum if self.verify else None
        found = self._checked.setdefault(extent, checked(checksum, extent.num_bytes))
        with self._naming(tensor, extent), self.folder.open(extent.file) as file:
            fill, filled = partial(self._fill, extent, file.fileno(), start), 0
            for offset, length in runs(box, outer):
                piece = out[filled : filled + length * item_bytes]
                found.read(offset * item_bytes, piece, fill)
                filled += length * item_bytes

    @contextmanager
    def _naming(self, tensor: StoredTensor, extent: Extent) -> Iterator[None]:
        path = self.folder.root / extent.file
        try:
            with naming(path):
                yield
        except Damage as damage:
            start = extent.start
            raise CheckpointError(
                f"{path}: bytes {start + damage.start} to {start + damage.end}, of tensor "
                f"{tensor.name!r} {tensor.dtype} {list(tensor.shape)}, are damaged: their "
                f"{damage.found}, it was {damage.expected} when they were written; copy the file "
                "again."
            ) from None

    def _fill(
        self, extent: Extent, descriptor: int, start: int, offset: int, out: memoryview
    ) -> None:
        """Read the bytes from ``start + offset`` of the file on."""
        start += offset
        count = self.num_bytes_read.get(extent.file, 0)
        self.num_bytes_read[extent.file] = count + len(out)
        while out:
            num_bytes = os.preadv(descriptor, [out[:MAX_READ_BYTES]], start)
            if num_bytes == 0:
                raise CheckpointError(
                    f"{self.folder.root / extent.file} ends at byte {start}, where {len(out)} more "
                    "bytes were expected; it was cut off or changed while it was read."
                )
            out, start = out[num_bytes:], start + num_bytes


def _in_dims(stored: Tensor, dims: Sequence[int], box: Box) -> Tensor:
    """A tensor whose dims are ``dims`` of a box, as a view ``[*box.shape]``."""
    ordered = stored.permute([dims.index(d) for d in sorted(dims)])
    # A dim that is not stored has one index.
    return ordered[tuple(slice(None) if d in dims else None for d in range(len(box.shape)))]


def _permuted(box: Box, order: Sequence[int]) -> Box:
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
