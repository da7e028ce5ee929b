"""Regions: boxes of ranks as layouts that give each rank what it needs, and no more."""

from __future__ import annotations

import random

from rvdcomm import Box, Layout
from rvdcomm.interop.vllm.regions import cropped, joined, regions_of
from rvdcomm.layout import merged


def random_box(draw: random.Random, shape: list[int]) -> Box:
    low = [draw.randrange(n) for n in shape]
    high = [draw.randrange(a + 1, n + 1) for a, n in zip(low, shape, strict=True)]
    return Box(tuple(low), tuple(high))


def test_the_cells_of_a_rank_tile_its_boxes() -> None:
    draw = random.Random(0)
    for _ in range(500):
        shape = [draw.randrange(1, 7) for _ in range(draw.randrange(1, 4))]
        needed = {
            rank: joined(random_box(draw, shape) for _ in range(draw.randrange(3)))
            for rank in range(draw.randrange(1, 5))
        }
        cells: dict[int, list[Box]] = {rank: [] for rank in needed}
        for region, layout in regions_of(needed):
            assert layout.shape == region.shape
            for rank in layout.ranks:
                cell = layout.cell(rank).box
                placed = Box(
                    tuple(a + b for a, b in zip(cell.lo, region.lo, strict=True)),
                    tuple(a + b for a, b in zip(cell.hi, region.lo, strict=True)),
                )
                assert any(box.contains(placed) for box in needed[rank])
                cells[rank].append(placed)
        for rank, boxes in needed.items():
            assert sum(c.num_elements for c in cells[rank]) == sum(b.num_elements for b in boxes)
            assert not any(
                a.overlaps(b) for i, a in enumerate(cells[rank]) for b in cells[rank][:i]
            )


def test_usual_needs_are_one_layout() -> None:
    rows = {rank: [Box((2 * rank, 0), (2 * rank + 2, 3))] for rank in range(4)}
    assert [str(layout) for _, layout in regions_of(rows)] == [
        "R(1)V(1)D(4,1) shape(8,3) ranks(0:4)"
    ]
    shared = {rank: [Box((rank // 2, 0), (rank // 2 + 1, 3))] for rank in range(4)}
    assert [str(layout) for _, layout in regions_of(shared)] == [
        "R(2)V(1)D(2,1) shape(2,3) ranks(0,2,1,3)"
    ]
    padded = {0: [Box((0,), (8,))], 1: [Box((8,), (13,))]}
    assert [str(layout) for _, layout in regions_of(padded)] == [
        "R(1)V(1)D(2) shape(13) ranks(0,1) cuts(0,8,13)"
    ]


def test_halves_of_a_fused_tensor_are_two_layouts() -> None:
    halves = {
        rank: [Box((3 * rank,), (3 * rank + 3,)), Box((6 + 3 * rank,), (9 + 3 * rank,))]
        for rank in range(2)
    }
    assert [(str(box), str(layout.rvd)) for box, layout in regions_of(halves)] == [
        ("[0:6]", "R(1)V(1)D(2)"),
        ("[6:12]", "R(1)V(1)D(2)"),
    ]


def test_joined_boxes_are_apart_and_hold_the_given_ones() -> None:
    draw = random.Random(1)
    for _ in range(300):
        shape = [draw.randrange(1, 8) for _ in range(2)]
        boxes = [random_box(draw, shape) for _ in range(draw.randrange(1, 6))]
        found = joined(boxes)
        assert not any(a.overlaps(b) for i, a in enumerate(found) for b in found[:i])
        assert all(any(outer.contains(box) for outer in found) for box in boxes)
        assert found == merged(found)


def test_a_cropped_layout_gives_ranks_what_they_have_of_the_box() -> None:
    draw = random.Random(2)
    for _ in range(200):
        layout = Layout((7, 5), draw.choice(["R(1)V(1)D(3,2)", "R(2)V(1)D(3,1)", "R(1)V(2)D(1,3)"]))
        box = random_box(draw, [7, 5])
        part = cropped(layout, box)
        for rank in layout.ranks:
            inside = layout.cell(rank).box.intersect(box)
            cell = part.cell(rank).box
            assert cell.num_elements == (0 if inside is None else inside.num_elements)
            if inside is not None:
                assert cell.lo == tuple(a - b for a, b in zip(inside.lo, box.lo, strict=True))
