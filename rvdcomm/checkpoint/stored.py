"""Stored tensors: where the bytes of every box of a tensor lie in the files of a checkpoint.

Every kind of checkpoint is read into these values. The code that uses them knows no file format.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from zlib import crc32

import numpy as np

from rvdcomm.checkpoint.folder import Folder
from rvdcomm.errors import CheckpointError
from rvdcomm.layout import ITEM_BYTES, MAX_DIMS, Box
from rvdcomm.text import MAX_INTEGER, quoted

MAX_BOXES = 1 << 14
"""Limit for the boxes of one tensor: 16,384 ranks. At worst, the time to check that boxes tile the
tensor grows with the square of their number."""


@dataclass(frozen=True, slots=True)
class Extent:
    """A stored array ``[*shape]``, in ``num_bytes`` bytes of ``file`` from ``start`` on.

    The bytes are the elements in row-major order or, if ``is_archive``, a file within the file, as
    ``torch.save`` writes it. ``checksum`` is that of the bytes, if the checkpoint has one.
    """

    file: str
    start: int
    num_bytes: int
    shape: tuple[int, ...]
    is_archive: bool = False
    checksum: str | None = None


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """The elements of a box of a tensor: a box of a stored array, or zeros.

    Attributes:
        box: the box of the tensor.
        extent: the stored array; None for zeros.
        part: the value part of which these are elements.
        dims: for each dim of the array, the tensor's dim that it is, or None if the block takes one
            index of it. A dim of the tensor that is no dim of the array has one index in ``box``.
        at: the index in the array of the first element of the box.
    """

    box: Box
    extent: Extent | None
    part: int = 0
    dims: tuple[int | None, ...] = ()
    at: tuple[int, ...] = ()

    @classmethod
    def whole(cls, extent: Extent, box: Box, part: int = 0) -> StoredBlock:
        """The block of a whole array, which has the shape of the box."""
        return cls(box, extent, part, tuple(range(len(extent.shape))), (0,) * len(extent.shape))

    @property
    def is_in_order(self) -> bool:
        """Whether the array has the elements in the order of the tensor."""
        dims = [d for d in self.dims if d is not None]
        return self.extent is not None and not self.extent.is_archive and dims == sorted(dims)

    def stored(self, box: Box) -> Box:
        """The box of the array that has the elements of ``box``, a box inside of ``self.box``."""
        lo, hi = list(self.at), [a + 1 for a in self.at]
        for s, d in enumerate(self.dims):
            if d is not None:
                lo[s] += box.lo[d] - self.box.lo[d]
                hi[s] = lo[s] + box.hi[d] - box.lo[d]
        return Box(tuple(lo), tuple(hi))


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a checkpoint. Blocks with the same part and box are replicas.

    Law (tests/checkpoint/test_stored.py): for every part, the boxes of its blocks tile the tensor.

    Raises:
        CheckpointError: the boxes do not tile the tensor.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    blocks: tuple[StoredBlock, ...]
    num_parts: int = 1

    def __post_init__(self) -> None:
        check_shape(self.name, self.shape)
        for part in range(self.num_parts):
            self._check_tiling({b.box for b in self.blocks if b.part == part})

    def _check_tiling(self, boxes: set[Box]) -> None:
        whole = Box.of_shape(self.shape)
        boxes = {box for box in boxes if not box.is_empty}
        if len(boxes) > MAX_BOXES:
            raise CheckpointError(
                f"tensor {self.name!r} is in {len(boxes)} boxes; up to {MAX_BOXES} are read."
            )
        for box in boxes:
            if not whole.contains(box):
                raise CheckpointError(
                    f"tensor {self.name!r} of shape {self.shape} has a shard {box} outside of it; "
                    "its files or their description are damaged."
                )
        found = sum(box.num_elements for box in boxes)
        if found != whole.num_elements or not are_disjoint(boxes):
            raise CheckpointError(
                f"tensor {self.name!r}: {len(boxes)} shards of {found} elements do not tile shape "
                f"{self.shape} ({whole.num_elements} elements); shards are missing or doubled."
            )

    @property
    def num_bytes(self) -> int:
        """Bytes of one value part of the whole tensor."""
        return prod(self.shape) * ITEM_BYTES[self.dtype]

    @cached_property
    def chosen(self) -> tuple[StoredBlock, ...]:
        """One replica of every part and box, parts ascending.

        The choice depends on the tensor's name, so that the reads of many tensors are spread over
        the files of all replicas.
        """
        replicas: dict[tuple[int, Box], list[StoredBlock]] = {}
        for block in self.blocks:
            if not block.box.is_empty:
                replicas.setdefault((block.part, block.box), []).append(block)
        turn = crc32(self.name.encode("utf-8", "surrogatepass"))
        return tuple(
            sorted(replicas[key], key=_place)[turn % len(replicas[key])] for key in sorted(replicas)
        )


@dataclass(frozen=True)
class Catalog:
    """A checkpoint that can be read: its tensors by name, and the folder that holds them.

    Attributes:
        kind: the form of the checkpoint.
        others: names of entries that are no tensors (a step count, say). They are pickles, so
            nothing here reads them.
        unnamed: names of tensors that are in the files and not in the index, and are left out.
        metadata: texts about the model in the headers of safetensors files: by key, the different
            texts of all files.
    """

    folder: Folder
    kind: str
    tensors: dict[str, StoredTensor]
    others: tuple[str, ...] = ()
    unnamed: tuple[str, ...] = ()
    metadata: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    @cached_property
    def files(self) -> tuple[str, ...]:
        """Names of the files that hold tensors, sorted."""
        extents = (b.extent for t in self.tensors.values() for b in t.blocks)
        return tuple(sorted({extent.file for extent in extents if extent is not None}))


def _place(block: StoredBlock) -> tuple[str, int]:
    return ("", 0) if block.extent is None else (block.extent.file, block.extent.start)


def are_disjoint(boxes: Iterable[Box]) -> bool:
    """Whether no two of these boxes have an element in common; no box may be empty."""
    ordered = sorted(boxes)
    if len(ordered) < 2 or not ordered[0].lo:
        return len(ordered) < 2
    lo = np.array([box.lo for box in ordered])
    hi = np.array([box.hi for box in ordered])
    # Boxes are sorted along the dim in which they have the most different starts. Of the boxes
    # after a box, only those that start before it ends can overlap it.
    dim = int(np.argmax([len(np.unique(lo[:, d])) for d in range(lo.shape[1])]))
    order = np.argsort(lo[:, dim], kind="stable")
    lo, hi = lo[order], hi[order]
    last = np.searchsorted(lo[:, dim], hi[:, dim], side="left")
    return not any(
        ((lo[i + 1 : last[i]] < hi[i]) & (hi[i + 1 : last[i]] > lo[i])).all(axis=1).any()
        for i in range(len(ordered))
    )


def check_shape(name: str, shape: tuple[int, ...]) -> None:
    """Raise a CheckpointError if no tensor can have this shape."""
    too_many = len(shape) > MAX_DIMS
    if (
        too_many
        or any(size < 0 for size in shape)
        or prod(map(max, shape, [1] * len(shape))) > (MAX_INTEGER // 16)
    ):
        raise CheckpointError(
            f"tensor {quoted(name)} has shape {quoted(shape)}; expected up to {MAX_DIMS} sizes of "
            "at least 0 whose product is a 64-bit number of bytes."
        )
