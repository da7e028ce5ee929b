"""Call: the memory of one run of a rank's program."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rvdcomm.program import DST, SRC


@dataclass(slots=True)
class Call:
    """The caller's tensors and the block of staging memory, as flat tensors.

    ``src`` may be strided; a call of the backend needs it in one piece, and gets that once.
    """

    src: Tensor | None
    dst: Tensor | None
    arena: Tensor
    dtype: torch.dtype
    sent_bytes: int = 0
    works: dict[int, list[Any]] = field(default_factory=dict)
    _blocks: dict[str, Tensor] = field(default_factory=dict)

    def bytes(self, name: str) -> Tensor:
        """The block of memory in which a buffer lies, as bytes."""
        if name not in (SRC, DST):
            return self.arena
        if name not in self._blocks:
            shard = self.src if name == SRC else self.dst
            assert shard is not None
            self._blocks[name] = shard.contiguous().view(-1).view(torch.uint8)
        return self._blocks[name]

    def elements(self, name: str) -> Tensor:
        """The same, as elements."""
        return self.bytes(name).view(self.dtype)
