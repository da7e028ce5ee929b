"""Views: blocks of other boxes and dims of the same stored arrays; no data is moved."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from rvdcomm.checkpoint.stored import StoredBlock, StoredTensor
from rvdcomm.layout import Box


def cropped(tensor: StoredTensor, box: Box) -> StoredTensor:
    """The tensor of a box of a stored tensor, of the box's shape."""
    blocks = list(tensor.blocks)
    for dim, (lo, hi) in enumerate(zip(box.lo, box.hi, strict=True)):
        blocks = moved(blocks, dim, [(lo, hi, 0)])
    return replace(tensor, shape=box.shape, blocks=tuple(blocks))


def moved(
    blocks: Iterable[StoredBlock], dim: int, pieces: Iterable[tuple[int, int, int]]
) -> list[StoredBlock]:
    """Blocks of the ranges ``[lo, hi)`` of a dim, each moved so that it begins at ``to``."""
    return [
        found
        for lo, hi, to in pieces
        for block in blocks
        if (found := _ranged(block, dim, lo, hi, to - lo)) is not None
    ]


def _ranged(block: StoredBlock, dim: int, lo: int, hi: int, by: int) -> StoredBlock | None:
    lo, hi = max(block.box.lo[dim], lo), min(block.box.hi[dim], hi)
    if lo >= hi:
        return None
    inner = Box(with_value(block.box.lo, dim, lo), with_value(block.box.hi, dim, hi))
    box = Box(with_value(inner.lo, dim, lo + by), with_value(inner.hi, dim, hi + by))
    return replace(block, box=box, at=block.stored(inner).lo)


def without_dim(block: StoredBlock, dim: int) -> StoredBlock:
    """A block that has one index of a dim, without this dim."""
    lo, hi = block.box.lo, block.box.hi
    dims = tuple(None if d is None or d == dim else d - (d > dim) for d in block.dims)
    return replace(block, box=Box(lo[:dim] + lo[dim + 1 :], hi[:dim] + hi[dim + 1 :]), dims=dims)


def with_dim(block: StoredBlock, dim: int, i: int) -> StoredBlock:
    """A block with a new dim, of which it has index ``i``."""
    lo, hi = block.box.lo, block.box.hi
    dims = tuple(None if d is None else d + (d >= dim) for d in block.dims)
    box = Box((*lo[:dim], i, *lo[dim:]), (*hi[:dim], i + 1, *hi[dim:]))
    return replace(block, box=box, dims=dims)


def with_value(values: tuple[int, ...], dim: int, value: int) -> tuple[int, ...]:
    """``values``, but ``value`` at ``dim``."""
    return (*values[:dim], value, *values[dim + 1 :])


def permuted(block: StoredBlock, dims: tuple[int, ...]) -> StoredBlock:
    """A block whose dim k is dim ``dims[k]`` of the given block."""
    lo, hi = (tuple(ends[d] for d in dims) for ends in (block.box.lo, block.box.hi))
    return replace(
        block,
        box=Box(lo, hi),
        dims=tuple(None if d is None else dims.index(d) for d in block.dims),
    )
