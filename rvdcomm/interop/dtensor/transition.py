"""Transition: what has to move between two placements of a tensor, in terms of layouts.

DTensor can express things that layouts cannot. They are handled here:

- Mesh dims along which both sides hold parts of one kind are *kept*: every coordinate there is a
  separate tensor, and nothing is reduced. Parts of a maximum, too, can be moved in this way.
- An average is a sum, divided by the number of its parts.
- A target that is partial by average, minimum or maximum receives replicas, because a reduction of
  equal values gives the value.
- Strided shards with gaps are moved in slabs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import Partial

from rvdcomm import LayoutError
from rvdcomm.interop.dtensor.numbering import Numbering
from rvdcomm.interop.dtensor.placements import is_masked, is_sum, sharding_of_dtensor
from rvdcomm.interop.dtensor.runs import length
from rvdcomm.interop.dtensor.sharding import DTensorSharding
from rvdcomm.interop.dtensor.slabs import slabs_of
from rvdcomm.layout import Box

_AVERAGES = ("avg",)
_IDEMPOTENT = ("avg", "min", "max")
"""Reductions that give v for parts that all equal v."""


@dataclass(frozen=True)
class PlacementChange:
    """A transition from ``src`` to ``dst``: parts are summed, the sum is divided by ``divisor``."""

    src: DTensorSharding
    dst: DTensorSharding
    divisor: int = 1

    @cached_property
    def slabs(self) -> list[Box]:
        """Regions that are redistributed one by one; there is usually one."""
        return slabs_of(self.src, self.dst)

    @cached_property
    def members(self) -> tuple[int, ...]:
        """Ranks that take part, ascending."""
        return tuple(sorted({*self.src.ranks, *self.dst.ranks}))

    def __str__(self) -> str:
        return f"redistribute {self.src} -> {self.dst}"


def transition_of(
    src: Any, dst: Any, dtype: torch.dtype, rank: int, numbering: Numbering = None
) -> PlacementChange:
    """The transition from ``src`` to ``dst`` that ``rank`` takes part in.

    Args:
        src, dst: DTensors or DTensorSpecs, of one shape.
        dtype: of the tensor.
        rank: in the group.
        numbering: of the ranks of meshes in the group.

    Raises:
        LayoutError: the meshes do not fit each other, or a reduction cannot be planned.
    """
    if src.device_mesh.device_type != dst.device_mesh.device_type:
        raise LayoutError(
            f"the src mesh has {src.device_mesh.device_type} devices, the dst mesh "
            f"{dst.device_mesh.device_type} devices; use meshes of one type."
        )
    kept = _kept(src, dst)
    src_sharding, dst_sharding = (
        _sliced(sharding_of_dtensor(side).renumbered(numbering), kept, rank) for side in (src, dst)
    )
    averaged = _not_summed(src.placements, src_sharding.parts, _AVERAGES, "to sum and divide")
    if averaged and not (dtype.is_floating_point or dtype.is_complex):
        raise LayoutError(f"{src.placements[averaged[0]]}: an average of {dtype} is no {dtype}.")
    whole = _not_summed(dst.placements, dst_sharding.parts, _IDEMPOTENT, "to make from replicas")
    parts = tuple(m for m in dst_sharding.parts if m not in whole)
    divisor = prod(src_sharding.mesh[m] for m in averaged)
    return PlacementChange(src_sharding, replace(dst_sharding, parts=parts), divisor)


def shard_shape(sharding: DTensorSharding, rank: int) -> tuple[int, ...] | None:
    """Shape of the shard of ``rank``; None outside the mesh."""
    return tuple(map(length, sharding.held(rank))) if rank in sharding.ranks else None


def _kept(src: Any, dst: Any) -> list[int]:
    """Mesh dims along which the parts stay as they are."""
    if src.device_mesh != dst.device_mesh:
        return []
    pairs = enumerate(zip(src.placements, dst.placements, strict=True))
    return [m for m, (a, b) in pairs if type(a) is Partial and a == b]


def _sliced(sharding: DTensorSharding, kept: list[int], rank: int) -> DTensorSharding:
    """The sharding on the ranks that have the coordinates of ``rank`` along the dims ``kept``."""
    if not kept or rank not in sharding.ranks:
        return sharding
    coordinate = np.unravel_index(sharding.ranks.index(rank), sharding.mesh)
    index = tuple(
        slice(c, c + 1) if m in kept else slice(None) for m, c in enumerate(map(int, coordinate))
    )
    ranks = np.array(sharding.ranks).reshape(sharding.mesh)[index]
    parts = tuple(m for m in sharding.parts if m not in kept)
    return replace(sharding, mesh=ranks.shape, ranks=tuple(ranks.reshape(-1).tolist()), parts=parts)


def _not_summed(
    placements: Any, parts: Iterable[int], known: tuple[str, ...], what: str
) -> list[int]:
    """Mesh dims whose parts are not summands; their reductions must be among ``known``."""
    found = [m for m in parts if not is_sum(placements[m])]
    for m in found:
        if is_masked(placements[m]) or placements[m].reduce_op not in known:
            raise LayoutError(
                f"{placements[m]!r} of mesh dim {m} is no reduction {what}; those are "
                f"{', '.join(('sum', *known))}."
            )
    return found
