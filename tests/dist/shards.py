"""Inputs and checks of calls on ranks: shards of a seeded tensor, equal in every process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

import rvdcomm as rv
from rvdcomm.run import pool
from tests.oracle import Array, data_faults, parts_of, shards_of


def shard_of(rank: int, layout: rv.Layout, seed: int = 0, dtype: str = "float32") -> Tensor | None:
    """The shard of ``rank``, of a tensor of random integers; None outside ``layout``."""
    shard = shards_of(layout, parts_of(layout, dtype, seed)).get(rank)
    return None if shard is None else torch.from_numpy(shard)


@contextmanager
def pool_of_all_sizes() -> Iterator[None]:
    """On this rank, place small tensors in the pool, too; other ranks read the pool in place."""
    before, pool.MIN_BYTES = pool.MIN_BYTES, 1
    try:
        yield
    finally:
        pool.MIN_BYTES = before


def pooled(tensor: Tensor) -> Tensor:
    """A copy of the tensor in the pool."""
    return rv.empty(tensor.shape, tensor.dtype).copy_(tensor)


def faults_of(
    results: Sequence[Tensor | Array | None],
    src: rv.Layout,
    dst: rv.Layout,
    seed: int = 0,
    dtype: str = "float32",
) -> list[str]:
    """The faults in the results of all ranks, where each rank passed its ``shard_of``."""
    got = [rank for rank, result in enumerate(results) if result is not None]
    if got != sorted(dst.ranks):
        return [f"ranks {got} have a result, dst has ranks {sorted(dst.ranks)}"]
    shards = {rank: np.asarray(results[rank]) for rank in got}
    return data_faults(dst, shards, parts_of(src, dtype, seed))


def error_of(call: Callable[[], Any]) -> str:
    """``"Class: message"`` of the error that ``call`` raises; ``"none"`` if it raises none."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"
