"""Laws of slices: they tile their box evenly, and each runs one phase behind the one before."""

from __future__ import annotations

import random

import pytest

from rvdcomm.layout import Box
from rvdcomm.program.interleave import interleaved
from rvdcomm.program.slices import MAX_FINEST_BOXES, Slicing
from tests.oracle import random_layout, random_shape


@pytest.mark.parametrize("seed", range(6))
def test_slices_of_a_box_tile_the_box(seed: int) -> None:
    rng = random.Random(seed)
    shape, num_slices = random_shape(rng), rng.choice([2, 3, 8])
    layouts = [random_layout(rng, shape, range(rng.choice([2, 4, 6]))) for _ in range(3)]
    boxes = [layout.cell(rank).box for layout in layouts for rank in layout.ranks]
    slicing = Slicing.of(boxes, num_slices)
    for box in boxes:
        parts = [slicing.of_box(box, i) for i in range(slicing.num_slices)]
        flat = [part for of_slice in parts for part in of_slice]
        assert sum(part.num_elements for part in flat) == box.num_elements
        assert all(box.contains(part) for part in flat if not part.is_empty)
        overlaps = [a.intersect(b) for i, a in enumerate(flat) for b in flat[:i]]
        assert [x for x in overlaps if x is not None] == []


def test_slices_of_large_boxes_are_even() -> None:
    whole, half = Box((0, 0), (64, 32)), Box((0, 0), (32, 32))
    slicing = Slicing.of([whole, half], 4)
    sizes = [sum(b.num_elements for b in slicing.of_box(whole, i)) for i in range(4)]
    assert sizes == [64 * 32 // 4] * 4


def test_every_slice_has_a_piece_of_every_finest_box() -> None:
    shards = [Box((i * 16,), (i * 16 + 16,)) for i in range(4)]
    slicing = Slicing.of([Box((0,), (64,)), *shards], 4)
    assert [slicing.of_box(shard, 1) for shard in shards] == [
        (Box((i * 16 + 4,), (i * 16 + 8,)),) for i in range(4)
    ]


@pytest.mark.parametrize("boxes", [[], [Box((), ())]], ids=["none", "scalar"])
def test_empty_lists_and_scalars_are_one_slice(boxes: list[Box]) -> None:
    assert Slicing.of(boxes, 8).num_slices == 1


def test_too_many_finest_boxes_are_one_slice() -> None:
    boxes = [Box((i,), (i + 1,)) for i in range(MAX_FINEST_BOXES + 1)]
    assert Slicing.of(boxes, 2).num_slices == 1


def test_each_slice_runs_one_phase_behind_the_slice_before_it() -> None:
    lanes = [[[f"{slice_}{phase}"] for phase in "abc"] for slice_ in (0, 1)]
    assert interleaved(lanes) == ["0a", "1a", "0b", "1b", "0c", "1c"]  # type: ignore[arg-type]
