"""Call: the memory of one run of a rank's program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rvdcomm.program import DST, SRC


@dataclass(slots=True)
class Call:
    """The caller's tensors and the block of staging memory; ``arena`` holds elements.

    ``src`` may be strided; a call of the backend needs it in one piece, and gets that once.
    """

    src: Tensor | None
    dst: Tensor | None
    arena: Tensor
    sent_bytes: int = 0
    works: dict[int, list[Any]] = field(default_factory=dict)
    _whole_src: Tensor | None = None

    def block(self, name: str) -> Tensor:
        """The contiguous tensor in which a buffer lies."""
        if name == DST:
            assert self.dst is not None
            return self.dst
        if name != SRC:
            return self.arena
        if self._whole_src is None:
            assert self.src is not None
            self._whole_src = self.src.contiguous()
        return self._whole_src

    def run(self, name: str, start: int, count: int) -> Tensor:
        """``count`` elements of a block, from its element ``start`` on."""
        block = self.block(name)
        return block.as_strided((count,), (1,), block.storage_offset() + start)

    def bytes(self, name: str, start: int, count: int) -> Tensor:
        """The same as bytes, which every backend can move."""
        return self.run(name, start, count).view(torch.uint8)
