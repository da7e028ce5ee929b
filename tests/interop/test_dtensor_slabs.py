"""Laws of slabs."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from rvdcomm.interop.dtensor.placements import sharding_of
from rvdcomm.interop.dtensor.sharding import DTensorSharding
from rvdcomm.interop.dtensor.slabs import slabs_of, slices_of
from rvdcomm.layout import Box, merged

RANKS = np.arange(6).reshape(2, 3)
KINDS = [Replicate(), Shard(0), *(_StridedShard(0, split_factor=k) for k in (2, 3, 5))]
SHARDINGS = [
    sharding_of(RANKS, placements, (11, 4)) for placements in product(KINDS, [*KINDS, Shard(1)])
]
# A sample of 8 pairs; all pairs would be 900.
PAIRS = list(product(SHARDINGS[::5], SHARDINGS[::7]))[::4]


def indices(sharding: DTensorSharding, rank: int, dim: int) -> list[int]:
    return [i for a, b in sharding.held(rank)[dim] for i in range(a, b)]


@pytest.mark.parametrize("src, dst", PAIRS, ids=str)
def test_slabs_tile_the_tensor_and_each_is_a_pair_of_layouts(
    src: DTensorSharding, dst: DTensorSharding
) -> None:
    slabs = slabs_of(src, dst)
    assert merged(slabs) == (Box.of_shape(src.shape),)
    assert sum(slab.num_elements for slab in slabs) == 44
    for slab, sharding in product(slabs, (src, dst)):
        layout = sharding.layout(slab)
        for rank in range(6):
            slices = slices_of(sharding, rank, slab)
            box = layout.cell(rank).box
            for dim in range(2):
                held = indices(sharding, rank, dim)[slices[dim]]
                assert held == [slab.lo[dim] + i for i in range(box.lo[dim], box.hi[dim])]


@pytest.mark.parametrize("sharding", SHARDINGS[::3], ids=str)
def test_slabs_hold_every_element_of_a_shard_once(sharding: DTensorSharding) -> None:
    for rank in range(6):
        shape = [len(indices(sharding, rank, dim)) for dim in range(2)]
        count = np.zeros(shape, int)
        for slab in slabs_of(sharding):
            count[slices_of(sharding, rank, slab)] += 1
        assert (count == 1).all()


@pytest.mark.parametrize("placements", [[Shard(0), Shard(1)], [Replicate(), Shard(0)]], ids=str)
def test_sharding_without_gaps_has_one_slab(placements: list[Any]) -> None:
    whole = sharding_of(RANKS, placements, (7, 5))
    assert slabs_of(whole, whole) == [Box((0, 0), (7, 5))]


def test_a_rank_outside_the_mesh_has_no_slices() -> None:
    assert slices_of(SHARDINGS[0], 6, Box((0, 0), (11, 4))) is None


def test_number_of_slabs_equals_the_number_of_runs_of_a_rank() -> None:
    strided = sharding_of([0, 1], [_StridedShard(0, split_factor=3)], (12,))
    assert slabs_of(strided) == [Box((0,), (4,)), Box((4,), (8,)), Box((8,), (12,))]
