"""Staging memory: the blocks in which ranks prepare data for each other, as one run finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import torch
from torch import Tensor

_numbers = count(1)


@dataclass(frozen=True, eq=False)
class StagingMemory:
    """The staging blocks of this rank and of the ranks that share memory with it.

    A run takes this value once, before it makes sure that its group is still there
    (``World.begin``), and holds it to its end. The memory stays mapped as long as the value is
    held. So every address that the run uses is valid, whatever another thread reserves or closes.

    ``own`` is this rank's block, as bytes. ``addresses`` are those of all ranks' blocks in this
    process. ``held`` is what keeps the blocks, and sources that are read in place, mapped.

    ``version`` names the value. A stage remembers the version to which it is bound and not the
    value, because a program that is not called again must not keep blocks that were replaced.
    """

    own: Tensor
    addresses: Sequence[int]
    held: Sequence[Any] = ()
    version: int = field(default_factory=_numbers.__next__)

    @classmethod
    def none(cls, num_ranks: int, device: torch.device | None = None) -> StagingMemory:
        """No memory: before anything is reserved, and after the end of a group."""
        return cls(torch.empty(0, dtype=torch.uint8, device=device), [0] * num_ranks)
