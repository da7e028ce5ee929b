"""Held: which part of a tensor a trainer's rank has, whatever keeps it there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rvdcomm import RVD, Box, Layout, LayoutError
from rvdcomm.interop.dtensor import (
    check_sums,
    key_of,
    local_tensor,
    sharding_of_dtensor,
    slabs_of,
    slices_of,
    spec_of,
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


Weight = Tensor | tuple[Tensor, Layout | str]
"""A tensor as a rank of the trainer passes it: a DTensor, its shard with the layout over the ranks
of the trainer, or a whole tensor, which is a replica on every rank that passes it."""


Places = tuple[tuple[Region, ...], tuple[tuple[slice, ...], ...]]
"""The slabs of a DTensor with their layouts, and where each lies in the shard of a rank."""


def held_by(
    weights: Mapping[str, Weight], rank: int, known: dict[Any, Places] | None = None
) -> dict[str, Held]:
    """What a rank of the trainer holds of the tensors of a state dict; nothing is copied.

    A Parameter counts as its data. Meshes of DTensors name ranks of the trainer.

    Args:
        weights: the tensors.
        rank: of this process.
        known: the places of DTensors, by what they follow from; those that are found are added. A
            model has thousands of tensors, which are sharded in a few ways.

    Raises:
        LayoutError: a reduction is no sum, or a shard is not what its layout gives this rank.
    """
    known = {} if known is None else known
    found = {}
    for name, weight in weights.items():
        tensor = weight[0] if isinstance(weight, tuple) and weight else weight
        if not isinstance(tensor, Tensor):
            raise LayoutError(
                f"tensor {name!r}: rank {rank} of the trainer passes {type(tensor).__name__}; pass "
                "tensors, DTensors, or pairs of a shard and its layout."
            )
        if isinstance(weight, DTensor):
            if weight.device_mesh.get_coordinate() is not None:
                found[name] = _of_dtensor(weight, rank, known)
        elif isinstance(weight, tuple):
            found[name] = _of_shard(name, weight[0].detach(), Layout.parse(str(weight[1])), rank)
        else:
            alone = RVD(1, 1, (1,) * weight.dim())
            found[name] = _of_shard(
                name, weight.detach(), Layout(weight.shape, alone, [rank]), rank
            )
    return found


def _of_dtensor(tensor: DTensor, rank: int, known: dict[Any, Places]) -> Held:
    key = key_of(spec_of(tensor))
    if key not in known:
        known[key] = _places(tensor, rank)
    slabs, slices = known[key]
    local = local_tensor(tensor)
    return Held(tensor.dtype, slabs, tuple(local[where] for where in slices))


def _places(tensor: DTensor, rank: int) -> Places:
    check_sums(tensor.placements)
    sharding = sharding_of_dtensor(tensor)
    slabs, places = [], []
    for slab in slabs_of(sharding):
        slices = slices_of(sharding, rank, slab)
        assert slices is not None, "a rank with a coordinate is in the mesh"
        slabs.append((slab, sharding.layout(slab)))
        places.append(slices)
    return tuple(slabs), tuple(places)


def _of_shard(name: str, shard: Tensor, layout: Layout, rank: int) -> Held:
    want = layout.cell(rank).box.shape
    if tuple(shard.shape) != want:
        raise LayoutError(
            f"tensor {name!r}: rank {rank} of the trainer passes {tuple(shard.shape)}, and "
            f"{layout} gives it {want}."
        )
    return Held(shard.dtype, ((Box.of_shape(layout.shape), layout),), (shard,))


Offered = dict[str, tuple[torch.dtype, tuple[Region, ...]]]
"""What a rank says of the tensors that it holds: their dtypes and layouts."""


def offered(held: Mapping[str, Held]) -> Offered:
    """What a rank says of its tensors when it meets workers; the same in every update."""
    return {name: (each.dtype, each.slabs) for name, each in held.items()}


def changed(before: Offered, now: Offered, rank: int) -> LayoutError | None:
    """The error for a rank whose tensors are not those that it offered."""
    for name in [*before, *now]:
        if before.get(name) != now.get(name):
            was, found = (_text(each.get(name)) for each in (before, now))
            return LayoutError(
                f"tensor {name!r}: rank {rank} of the trainer passes {found}, and it offered {was} "
                "when the sender was made; make another sender."
            )
    return None


def _text(said: tuple[torch.dtype, tuple[Region, ...]] | None) -> str:
    if said is None:
        return "nothing"
    dtype, slabs = said
    return f"{dtype} {'; '.join(str(layout) for _, layout in slabs)}"


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
