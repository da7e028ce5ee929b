"""Placements: DTensor's mesh and placements to a layout, and back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from rvdcomm import LayoutError
from rvdcomm.interop.dtensor import private
from rvdcomm.interop.dtensor.sharding import DTensorSharding
from rvdcomm.layout import Layout

Mesh = DeviceMesh | Sequence[Any] | np.ndarray[Any, Any]
"""A DeviceMesh, or its global ranks as nested lists: then no process group is needed."""


def layout_of(
    mesh: Mesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    numbering: Mapping[int, int] | None = None,
) -> Layout:
    """The layout of a DTensor of ``shape``, in elements; partial placements become value parts.

    ``numbering`` gives the rank in the layout for every rank in the mesh; they are equal if None.

    Law (tests/interop/test_dtensor_layouts.py): every rank's cell is what DTensor's
    ``compute_local_shape_and_global_offset`` says.

    >>> str(layout_of([[0, 1], [2, 3]], [Replicate(), Shard(0)], (6, 10)))
    'R(2)V(1)D(2,1) shape(6,10) ranks(0:4)'

    Raises:
        LayoutError: the placements do not fit the mesh or the shape, or no layout can express them:
            a reduction that is not a sum, or a strided shard that leaves gaps.
    """
    check_sums(placements)
    return sharding_of(mesh, placements, shape).renumbered(numbering).layout()


def layout_of_dtensor(dtensor: Any, numbering: Mapping[int, int] | None = None) -> Layout:
    """The layout of a DTensor; arguments and errors of ``layout_of``."""
    check_sums(dtensor.placements)
    return sharding_of_dtensor(dtensor).renumbered(numbering).layout()


def placements_of(layout: Layout, mesh: Mesh) -> tuple[Placement, ...]:
    """The placements on ``mesh`` that mean ``layout``; without strided shards if possible.

    Law (tests/interop/test_dtensor_layouts.py): ``layout_of(mesh, placements_of(x, mesh),
    x.shape)`` places every element as ``x`` does.

    >>> placements_of(Layout((6, 10), "R(1)V(2)D(1,2)", ranks=[0, 2, 1, 3]), [[0, 1], [2, 3]])
    (Shard(dim=1), Partial(sum))

    Raises:
        LayoutError: there are none.
    """
    ranks = ranks_of(mesh)
    if sorted(layout.ranks) == sorted(ranks.reshape(-1).tolist()):
        for placements in _candidates(layout, ranks.shape):
            try:
                found = layout_of(ranks, placements, layout.shape)
            except LayoutError:
                continue
            if found == layout:
                return placements
    raise LayoutError(
        f"{layout}: no placements on a mesh {ranks.shape} of ranks {ranks.tolist()} mean this; "
        "DTensor cuts in the order of mesh dims, as torch.chunk does."
    )


def sharding_of(
    mesh: Mesh,
    placements: Sequence[Placement],
    shape: Sequence[int],
    order: Mapping[int, tuple[int, ...]] | None = None,
) -> DTensorSharding:
    """The sharding of a DTensor, without torch's types; every reduction counts as parts.

    Args:
        mesh, placements, shape: of the DTensor; the shape in elements.
        order: the mesh dims that cut a tensor dim, in their order, by tensor dim; from left to
            right if not given.
    """
    ranks = ranks_of(mesh)
    placements = normalized(placements, ranks.shape, len(shape))
    cutters: list[list[tuple[int, int]]] = [[] for _ in shape]
    for m, placement in enumerate(placements):
        if is_shard(placement):
            cutters[placement.dim].append((m, getattr(placement, "split_factor", 1)))
    for d, dims in (order or {}).items():
        cutters[d].sort(key=lambda cutter: dims.index(cutter[0]))
    return DTensorSharding(
        shape=tuple(shape),
        mesh=ranks.shape,
        ranks=tuple(ranks.reshape(-1).tolist()),
        parts=tuple(m for m, placement in enumerate(placements) if placement.is_partial()),
        cutters=tuple(map(tuple, cutters)),
    )


def sharding_of_dtensor(dtensor: Any) -> DTensorSharding:
    """The sharding of a DTensor or a DTensorSpec, in its own shard order."""
    order = private.shard_order(dtensor)
    return sharding_of(dtensor.device_mesh, dtensor.placements, dtensor.shape, order)


def normalized(
    placements: Sequence[Placement], mesh: Sequence[int], num_dims: int
) -> tuple[Any, ...]:
    """The placements, one per mesh dim, with tensor dims counted from the front."""
    if len(placements) != len(mesh):
        raise LayoutError(
            f"{len(placements)} placements {list(placements)} were given for a mesh of "
            f"{len(mesh)} dims {tuple(mesh)}; give one a mesh dim."
        )
    return tuple(_from_the_front(placement, num_dims) for placement in placements)


def ranks_of(mesh: Mesh) -> np.ndarray[Any, Any]:
    """The global ranks of a mesh, in its shape."""
    return np.asarray(mesh.mesh if isinstance(mesh, DeviceMesh) else mesh)


def is_shard(placement: Any) -> bool:
    """Whether a placement cuts a dim; ``is_shard()`` of torch is False for strided shards."""
    return isinstance(placement, Shard) or hasattr(placement, "split_factor")


def is_masked(placement: Any) -> bool:
    """Whether a placement is partial as in a sharded embedding: rows are masked before the sum."""
    return placement.is_partial() and type(placement) is not Partial


def is_sum(placement: Any) -> bool:
    """Whether a placement is partial and its parts are summed."""
    return type(placement) is Partial and placement.reduce_op == "sum"


def check_sums(placements: Sequence[Placement]) -> None:
    """Raise a LayoutError for a placement that is partial, and whose parts are not summed."""
    for placement in placements:
        if placement.is_partial() and not is_sum(placement):
            raise LayoutError(
                f"{list(placements)}: {placement!r} is no sum; the parts of a layout are summed."
            )


def _from_the_front(placement: Any, num_dims: int) -> Any:
    if not is_shard(placement):
        if not (placement.is_partial() or placement.is_replicate()):
            raise LayoutError(f"{placement!r} is no placement that rvdcomm knows.")
        return placement
    if not -num_dims <= placement.dim < num_dims:
        raise LayoutError(f"{placement!r} cuts a dim that a tensor of {num_dims} dims has not.")
    if placement.dim >= 0:
        return placement
    if hasattr(placement, "split_factor"):
        return private.strided_shard(placement.dim + num_dims, placement.split_factor)
    return Shard(placement.dim + num_dims)


def _candidates(layout: Layout, mesh: tuple[int, ...]) -> Iterator[tuple[Placement, ...]]:
    """Placements with the layout's counts: first in the default order of shards, then in others."""
    kinds: list[Placement] = [Replicate(), Partial(), *map(Shard, range(len(layout.shape)))]
    wanted = layout.rvd.counts
    fitting = []
    for choice in product(range(len(kinds)), repeat=len(mesh)):
        # Every placement means the same for a mesh dim of one rank; only Replicate is tried.
        if any(mesh[m] == 1 and kind != 0 for m, kind in enumerate(choice)):
            continue
        counts = [
            prod(n for n, k in zip(mesh, choice, strict=True) if k == kind)
            for kind in range(len(kinds))
        ]
        if tuple(counts) == wanted:
            fitting.append(tuple(kinds[kind] for kind in choice))
    yield from fitting
    for placements in fitting:
        for order in permutations(range(len(mesh))):
            strided = _in_order(placements, mesh, order)
            if strided != placements:
                yield strided


def _in_order(
    placements: tuple[Any, ...], mesh: tuple[int, ...], order: tuple[int, ...]
) -> tuple[Placement, ...]:
    """Placements that cut in this order of mesh dims.

    The split factor of a mesh dim is the number of pieces that mesh dims to its right have made
    before its turn. DTensor, which cuts from left to right, makes these pieces later.
    """
    out = list(placements)
    for turn, m in enumerate(order):
        before = [
            i
            for i in order[:turn]
            if i > m and is_shard(placements[m]) and placements[i] == placements[m]
        ]
        if before:
            out[m] = private.strided_shard(placements[m].dim, prod(mesh[i] for i in before))
    return tuple(out)
