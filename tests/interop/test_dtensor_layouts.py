"""Laws of meshes and placements as layouts; DTensor itself is the oracle."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import permutations, product
from math import prod
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import _StridedShard

import rvdcomm as rv
from rvdcomm.interop.dtensor import layout_of, placements_of
from rvdcomm.interop.dtensor.placements import sharding_of

SHAPES = [(6, 10), (7, 5), (3, 1), (0, 4), (9, 8)]
MESHES = [*[(1,), (3,), (8,)], *[(1, 4), (2, 3), (4, 2)], *[(2, 2, 2), (3, 1, 2)]]
KINDS = [Replicate(), Partial(), Shard(0), Shard(1)]


def ranks_on(mesh: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """Ranks in a random order, none of them 0."""
    return np.random.default_rng(seed=sum(mesh)).permutation(prod(mesh)).reshape(mesh) + 3


def every(mesh: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    return list(product(KINDS, repeat=len(mesh)))


def shard_orders(mesh: tuple[int, ...]) -> list[tuple[Placement, ...]]:
    """Placements that cut dim 0 by all mesh dims, in every order, as DTensor writes them."""
    found = []
    for order in permutations(range(len(mesh))):
        factors = {m: prod(mesh[i] for i in order[: order.index(m)] if i > m) for m in order}
        found.append(
            tuple(
                Shard(0) if factors[m] == 1 else _StridedShard(0, split_factor=factors[m])
                for m in range(len(mesh))
            )
        )
    return found


def region_by_dtensor(
    shape: Sequence[int], mesh: tuple[int, ...], placements: Sequence[Placement], at: Any
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return _compute_local_shape_and_global_offset(shape, mesh, list(map(int, at)), placements)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_cells_are_local_shapes_and_global_offsets(mesh: tuple[int, ...]) -> None:
    ranks = ranks_on(mesh)
    for shape, placements in product(SHAPES, every(mesh)):
        layout = layout_of(ranks, placements, shape)
        for at in np.ndindex(*mesh):
            box = layout.cell(int(ranks[at])).box
            assert (box.shape, box.lo) == region_by_dtensor(shape, mesh, placements, at), placements


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_ranks_with_equal_partial_coordinates_hold_the_same_value_part(
    mesh: tuple[int, ...],
) -> None:
    ranks = ranks_on(mesh)
    for placements in every(mesh):
        layout = layout_of(ranks, placements, (8, 16))
        partial = [m for m, p in enumerate(placements) if p.is_partial()]
        assert layout.rvd.v == prod(mesh[m] for m in partial)
        for a, b in product(np.ndindex(*mesh), repeat=2):
            first, second = layout.cell(int(ranks[a])), layout.cell(int(ranks[b]))
            if first.box == second.box and not first.box.is_empty:
                is_one = all(a[m] == b[m] for m in partial)
                assert (first.part == second.part) == is_one, placements


@pytest.mark.parametrize("mesh", [(2, 2), (2, 3), (3, 2), (2, 4), (2, 2, 2), (1, 2, 3)], ids=str)
def test_strided_cells_are_local_shapes_and_global_offsets(mesh: tuple[int, ...]) -> None:
    ranks = ranks_on(mesh)
    num_layouts = 0
    for size, placements in product(range(25), shard_orders(mesh)):
        sharding = sharding_of(ranks, placements, (size, 2))
        if any(len(held) > 1 for runs in sharding.runs for held in runs):
            with pytest.raises(rv.LayoutError, match="strided shards leave gaps in dim 0"):
                sharding.layout()
            continue
        num_layouts += 1
        layout = sharding.layout()
        for at in np.ndindex(*mesh):
            box = layout.cell(int(ranks[at])).box
            want = region_by_dtensor((size, 2), mesh, placements, at)
            assert (box.shape, box.lo) == want, (size, placements)
    # If all cuts are even, no order leaves a gap. So most cases have a layout.
    assert num_layouts >= 0.8 * 25 * len(shard_orders(mesh))


@pytest.mark.parametrize("mesh", [(2,), (3,), (2, 2), (3, 2), (2, 2, 2)], ids=str)
def test_ranks_hold_the_elements_that_dtensor_splits_off(mesh: tuple[int, ...]) -> None:
    kinds = [Shard(0), *(_StridedShard(0, split_factor=factor) for factor in (2, 3, 4))]
    # Sizes that are mostly prime, and one that all factors divide.
    for size, placements in product((1, 2, 5, 11, 12), product(kinds, repeat=len(mesh))):
        sharding = sharding_of(np.arange(prod(mesh)).reshape(mesh), placements, (size,))
        for rank, at in enumerate(np.ndindex(*mesh)):
            left = torch.arange(size)
            for placement, count, i in zip(placements, mesh, at, strict=True):
                left = placement._split_tensor(left, count, with_padding=False)[0][i]
            held = [i for start, stop in sharding.held(rank)[0] for i in range(start, stop)]
            assert held == left.tolist(), (size, placements, at)


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_placements_of_undoes_layout_of(mesh: tuple[int, ...]) -> None:
    ranks = ranks_on(mesh)
    cases = [(p, (7, 16)) for p in every(mesh)] + [(p, (24, 2)) for p in shard_orders(mesh)]
    for placements, shape in cases:
        layout = layout_of(ranks, placements, shape)
        assert layout_of(ranks, placements_of(layout, ranks), shape) == layout


def test_placements_of_prefers_placements_without_strides() -> None:
    layout = layout_of([[0, 1], [2, 3]], [Shard(0), Shard(1)], (4, 4))
    assert placements_of(layout, [[0, 1], [2, 3]]) == (Shard(0), Shard(1))


@pytest.mark.parametrize(
    "layout, mesh",
    [
        (rv.Layout((10,), "R(1)V(1)D(4)", cuts="balanced"), [0, 1, 2, 3]),
        (rv.Layout((10,), "R(1)V(1)D(4)", cuts=[[0, 1, 2, 3, 10]]), [[0, 1], [2, 3]]),
        (rv.Layout((12,), "R(1)V(1)D(4)", ranks=[0, 2, 3, 1]), [[0, 1], [2, 3]]),
        (rv.Layout((12,), "R(1)V(1)D(4)"), [0, 1]),
        (rv.Layout((12,), "R(2)V(1)D(3)"), [0, 1, 2, 3, 4, 5]),
    ],
    ids=["balanced", "any cuts", "any order", "other ranks", "no mesh dim"],
)
def test_placements_of_rejects_layouts_that_dtensor_cannot_express(
    layout: rv.Layout, mesh: Any
) -> None:
    with pytest.raises(rv.LayoutError, match="no placements on a mesh"):
        placements_of(layout, mesh)


def test_negative_dims_count_from_the_end() -> None:
    mesh = [[0, 1], [2, 3]]
    placements = [Shard(-1), _StridedShard(-2, split_factor=1)]
    assert layout_of(mesh, placements, (4, 6)) == layout_of(mesh, [Shard(1), Shard(0)], (4, 6))


@pytest.mark.parametrize(
    "placements, message",
    [
        ([Shard(0)], "1 placements .* for a mesh of 2 dims"),
        ([Shard(0)] * 3, "3 placements .* for a mesh of 2 dims"),
        ([Shard(2), Shard(0)], "cuts a dim that a tensor of 2 dims has not"),
        ([Shard(-3), Shard(0)], "cuts a dim that a tensor of 2 dims has not"),
        ([Partial("max"), Shard(0)], r"Partial\(max\) is no sum"),
        ([Partial("avg"), Shard(0)], r"Partial\(avg\) is no sum"),
        ([_StridedShard(0, split_factor=2), Replicate()], "leave gaps in dim 0, .* 0:2, 3:5;"),
        ([Placement(), Shard(0)], "no placement that rvdcomm knows"),
    ],
)
def test_layout_of_rejects_invalid_placements(placements: list[Placement], message: str) -> None:
    with pytest.raises(rv.LayoutError, match=message):
        layout_of([[0, 1], [2, 3]], placements, (6, 4))
