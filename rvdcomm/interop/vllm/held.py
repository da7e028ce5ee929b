"""Held: which part of a tensor a trainer's rank has, whatever keeps it there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rvdcomm import Box, Layout, LayoutError
from rvdcomm.interop.dtensor import (
    check_sums,
    local_tensor,
    sharding_of_dtensor,
    slabs_of,
    slices_of,
)
from rvdcomm.interop.vllm.regions import Region


@dataclass(frozen=True)
class Held:
    """A tensor of a trainer: its slabs, each with a layout, and this rank's part of each slab.

    Usually the only slab is the whole tensor. A DTensor whose strided shards leave gaps has several
    (docs/dtensor.md).
    """

    dtype: torch.dtype
    slabs: tuple[Region, ...]
    parts: tuple[Tensor, ...]


def held_by(
    tensors: Mapping[str, Tensor], layouts: Mapping[str, Layout | str], rank: int
) -> dict[str, Held]:
    """What a rank holds of the tensors of a state dict.

    Args:
        tensors: by name: DTensors on meshes of the trainer's ranks, or this rank's shards of
            tensors with an entry in ``layouts``. Any other tensor is whole, and a replica on every
            rank that passes it. A Parameter counts as its data.
        layouts: layouts over the ranks of the trainer.
        rank: this rank of the trainer.

    Raises:
        LayoutError: a reduction is no sum, or a shard is not what its layout gives this rank.
    """
    found = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            if tensor.device_mesh.get_coordinate() is not None:
                found[name] = _of_dtensor(tensor, rank)
            continue
        tensor = tensor.detach()
        layout = layouts.get(name)
        if layout is None:
            layout = Layout(tensor.shape, f"R(1)V(1)D({','.join('1' * tensor.dim())})", [rank])
        found[name] = _of_shard(name, tensor, Layout.parse(str(layout)), rank)
    return found


def _of_dtensor(tensor: DTensor, rank: int) -> Held:
    check_sums(tensor.placements)
    sharding = sharding_of_dtensor(tensor)
    local = local_tensor(tensor)
    slabs, parts = [], []
    for slab in slabs_of(sharding):
        slices = slices_of(sharding, rank, slab)
        assert slices is not None, "a rank with a coordinate is in the mesh"
        slabs.append((slab, sharding.layout(slab)))
        parts.append(local[slices])
    return Held(tensor.dtype, tuple(slabs), tuple(parts))


def _of_shard(name: str, shard: Tensor, layout: Layout, rank: int) -> Held:
    want = layout.cell(rank).box.shape
    if tuple(shard.shape) != want:
        raise LayoutError(
            f"tensor {name!r}: rank {rank} of the trainer passes {tuple(shard.shape)}, and "
            f"{layout} gives it {want}."
        )
    return Held(shard.dtype, ((Box.of_shape(layout.shape), layout),), (shard,))


def clipped(part: Tensor, cell: Box, box: Box) -> Tensor:
    """The elements of ``box`` in a shard that holds ``cell``; a view, which may be empty."""
    slices = []
    for low, high, a, b in zip(cell.lo, cell.hi, box.lo, box.hi, strict=True):
        start, stop = (min(max(point, a), b) for point in (low, high))
        slices.append(slice(start - low, stop - low) if start < stop else slice(0, 0))
    return part[tuple(slices)]


def whole_shape(slabs: Sequence[Region]) -> tuple[int, ...]:
    """The shape of the tensor that slabs tile."""
    return tuple(max(bounds) for bounds in zip(*(slab.hi for slab, _ in slabs), strict=True))


def overlaps_of(slab: Box, region: Box) -> Iterator[Box]:
    """The common part of a slab and a region, if any; that of two scalars is the scalar."""
    if not slab.lo:
        yield slab
        return
    common = slab.intersect(region)
    if common is not None:
        yield common
