"""Results: memory for what calls return, kept for the next call when a result is dropped.

A large tensor that torch allocates on the CPU comes in pages that the system clears one by one when
they are first touched, which takes several times as long as the copy into them.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from contextlib import suppress
from math import prod

import torch
from torch import Tensor

MIN_BYTES = 1 << 20
"""Smaller results come from torch, whose allocator keeps small blocks itself."""

MAX_KEPT_BYTES = 1 << 30
"""Of blocks that nobody uses; the least recently used go first."""


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """As ``torch.empty``; large ones on the CPU come from ``BLOCKS``."""
    num_bytes = prod(shape) * dtype.itemsize
    if device.type != "cpu" or num_bytes < MIN_BYTES:
        return torch.empty(shape, dtype=dtype, device=device)
    # The tensor's storage holds the view, and the view's end is the tensor's.
    block = BLOCKS.take(num_bytes)
    view = memoryview(block)
    weakref.finalize(view, BLOCKS.give_back, block).atexit = False
    return torch.frombuffer(view, dtype=torch.uint8, count=num_bytes).view(dtype).view(shape)


class Blocks:
    """Blocks of memory by size; those that are free are in ``_free``, the oldest first."""

    def __init__(self) -> None:
        self._free: list[mmap.mmap] = []
        # A result may be dropped while this thread is in here, by the garbage collector.
        self._lock = threading.RLock()

    @property
    def kept_bytes(self) -> int:
        """Bytes of free blocks."""
        return sum(map(len, self._free))

    def take(self, num_bytes: int) -> mmap.mmap:
        """A block of just so many whole pages."""
        size = -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        with self._lock:
            for i in reversed(range(len(self._free))):
                if len(self._free[i]) == size:
                    return self._free.pop(i)
        block = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with suppress(OSError):
            block.madvise(mmap.MADV_HUGEPAGE)
        return block

    def clear(self) -> None:
        """Let go of the free blocks."""
        with self._lock:
            self._free.clear()

    def give_back(self, block: mmap.mmap) -> None:
        """Keep a block for the next that wants its size, and let go of the oldest if it is much."""
        with self._lock:
            self._free.append(block)
            while self.kept_bytes > MAX_KEPT_BYTES:
                self._free.pop(0)


BLOCKS = Blocks()
