"""Memory that a caller may ask for: the pool that results come from."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rvdcomm.run import pool


def empty(shape: Sequence[int], dtype: torch.dtype = torch.float32) -> Tensor:
    """An uninitialized CPU tensor, in the pool that the results of ``redistribute`` come from.

    Ranks that read each other's memory read a source in the pool in place; any other source is
    copied first. The tensor is an ordinary one: its memory goes back to the pool when the last
    tensor or array on it is gone. Tensors of less than 1 MiB come from torch, and so do all if the
    system gives no memory for the pool.

    Args:
        shape: number of elements of every dim.
        dtype: of the elements.
    """
    return pool.empty(tuple(shape), dtype, torch.device("cpu"))


def empty_cache() -> None:
    """Give the memory of the pool that no tensor uses back to the system.

    The pool keeps up to 1 GiB of it for later results.
    """
    found = pool.pool_here()
    if found is not None:
        found.clear()
