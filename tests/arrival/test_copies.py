"""Who owns values and who has copies of them: every copy is compared, each element once."""

from __future__ import annotations

from itertools import product

import pytest
import torch

import rvdcomm as rv
from rvdcomm.arrival import Copy, Tally, copies_held, differing, digest_of, parts_owned
from tests.oracle import all_layouts

RANKS = range(5)


def layouts(shape: tuple[int, ...]) -> list[rv.Layout]:
    """Layouts without parts on the first four ranks, and on three others in another order."""
    first = [layout for layout in all_layouts(shape, 4) if layout.rvd.v == 1]
    others = [
        rv.Layout(shape, layout.rvd, [4, 0, 2], cuts="balanced")
        for layout in all_layouts(shape, 3)
        if layout.rvd.v == 1
    ]
    return first + others


@pytest.mark.parametrize("shape", [(5,), (4, 3), (0, 2), ()], ids=str)
def test_boxes_of_a_copy_tile_its_shard(shape: tuple[int, ...]) -> None:
    for src, dst in product(layouts(shape), repeat=2):
        boxes: dict[Copy, list[rv.Box]] = {}
        for rank in RANKS:
            for box, copies in parts_owned(src, dst, rank):
                for copy in copies:
                    boxes.setdefault(copy, []).append(box)
        held = {copy: box for rank in RANKS for copy, box in copies_held(src, dst, rank)}
        assert set(boxes) == set(held)
        for copy, shard in held.items():
            counts = torch.zeros(shape, dtype=torch.int64)
            for box in boxes[copy]:
                counts[box.slices_within(rv.Box.of_shape(shape))] += 1
            assert counts.sum() == shard.num_elements
            assert (counts[shard.slices_within(rv.Box.of_shape(shape))] == 1).all()


def test_a_wrong_element_is_found_in_the_copy_that_has_it() -> None:
    shape = (4, 3)
    whole = torch.arange(12, dtype=torch.float32).reshape(shape)
    everything = rv.Box.of_shape(shape)
    for src, dst in product(layouts(shape), repeat=2):
        copies = [each for rank in RANKS for each in copies_held(src, dst, rank)]
        tallies = [Tally() for _ in RANKS]
        for rank in RANKS:
            for box, of_box in parts_owned(src, dst, rank):
                values = whole[box.slices_within(everything)]
                tallies[rank].own(0, of_box, digest_of(values, box))
        for wrong, _ in copies:
            for copy, box in copies:
                values = whole[box.slices_within(everything)].clone()
                if copy == wrong:
                    values.view(-1)[-1] += 1
                tallies[copy.rank].hold(0, copy, digest_of(values, box))
            assert differing([tally.sums() for tally in tallies]) == [wrong]
