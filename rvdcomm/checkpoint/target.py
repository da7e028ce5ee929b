"""Target: a tensor of the result, and the batch of tensors with which it is written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from rvdcomm.checkpoint.stored import StoredTensor
from rvdcomm.checkpoint.windows import windows
from rvdcomm.layout import ITEM_BYTES, Box, Holding, Layout

CONVERTED = ("float16", "bfloat16", "float32", "float64")
"""Dtypes that are converted into each other. Integers are not; float8 would need scales."""

ALIGNMENT = 64
_NUM_BUFFERS = 4
_SUM_BYTES = 24
"""Temporary bytes per element of a sum in a wider dtype: up to three copies of 8 bytes."""


@dataclass(frozen=True)
class Target:
    """A tensor of the result: ``source`` converted to ``dtype`` and laid out by ``layout``."""

    name: str
    source: StoredTensor
    dtype: str
    layout: Layout
    memory_limit: int

    @cached_property
    def cells(self) -> tuple[Holding, ...]:
        """The cells of the layout, each with the ranks that hold it."""
        return self.layout.placement.holdings

    def shard_bytes(self, rank: int) -> int:
        """Bytes of a rank's shard."""
        return self.layout.cell(rank).box.num_elements * ITEM_BYTES[self.dtype]

    @property
    def read_bytes(self) -> int:
        """Bytes that are read: every element of every value part once, from one replica.

        What is between these elements in a block of 1 MiB is read for its checksum, too.
        """
        stored = (b.box.num_elements for b in self.source.chosen if b.extent is not None)
        return sum(stored) * ITEM_BYTES[self.source.dtype]

    @cached_property
    def buffer_items(self) -> tuple[int, ...]:
        """Bytes per element in each buffer: window, scratch, converted, packed; 0 if unused."""
        src, dst = ITEM_BYTES[self.source.dtype], ITEM_BYTES[self.dtype]
        blocks = self.source.chosen
        is_joined = len(blocks) > 1 or any(not block.is_in_order for block in blocks)
        is_cut = len(self.cells) > 1
        return (
            src,
            src if is_joined else 0,
            dst if self.dtype != self.source.dtype else 0,
            dst if is_cut else 0,
        )

    @property
    def element_bytes(self) -> int:
        """Bytes of all buffers for one element of a window."""
        is_summed_wide = self.source.num_parts > 1 and self.source.dtype not in CONVERTED
        return sum(self.buffer_items) + (_SUM_BYTES if is_summed_wide else 0)

    @cached_property
    def window_elements(self) -> int:
        """Elements of the largest window."""
        room = self.memory_limit - ALIGNMENT * _NUM_BUFFERS
        # No window is larger than the first.
        sizes = (window.num_elements for window in self.windows(room // self.element_bytes))
        return next(sizes, 0)

    def windows(self, max_elements: int | None = None) -> Iterator[Box]:
        """The windows of the tensor."""
        return windows(self.layout.shape, max_elements or max(self.window_elements, 1))

    @property
    def peak_bytes(self) -> int:
        """Bytes of all buffers while this tensor is moved."""
        return self.window_elements * self.element_bytes + ALIGNMENT * _NUM_BUFFERS


@dataclass(frozen=True)
class TargetBatch:
    """Tensors whose shards share one file per rank; the files of a batch are completed together."""

    targets: tuple[Target, ...]
    files: dict[int, str]

    def targets_of(self, rank: int) -> list[Target]:
        """The tensors of a rank's file, in the order of the file."""
        return [target for target in self.targets if rank in target.layout]
