"""Call memory: the memory that one run of a rank's program uses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rvdcomm.program import is_shard


@dataclass(slots=True)
class CallMemory:
    """The memory of one call: the caller's tensors by buffer name, and the staging block.

    ``arena`` is the staging block, as elements of the program's dtype. ``tag`` is the number that
    the messages of this call carry (``World.begin``). ``is_posted`` says that the call is counted
    only among the posted calls of its program.

    A src shard may be strided. If the backend reads it, it is made contiguous once per call.
    """

    shards: dict[str, Tensor]
    arena: Tensor
    tag: int = 0
    is_posted: bool = False
    sent_bytes: int = 0
    works: dict[int, list[Any]] = field(default_factory=dict)
    _whole: dict[str, Tensor] = field(default_factory=dict)

    def block(self, name: str) -> Tensor:
        """The contiguous tensor in which a buffer lies."""
        if not is_shard(name):
            return self.arena
        if name not in self._whole:
            self._whole[name] = self.shards[name].contiguous()
        return self._whole[name]

    def run(self, name: str, start: int, count: int) -> Tensor:
        """``count`` elements of a block, from its element ``start`` on."""
        block = self.block(name)
        return block.as_strided((count,), (1,), block.storage_offset() + start)

    def bytes(self, name: str, start: int, count: int) -> Tensor:
        """The same elements as bytes, which every backend can move."""
        return self.run(name, start, count).view(torch.uint8)
