"""Laws of box lists: an index finds what a scan finds."""

from __future__ import annotations

import random

import pytest

from rvdcomm.layout import Box
from rvdcomm.program.regions import BoxIndex, uncovered


def random_box(rng: random.Random, shape: tuple[int, ...]) -> Box:
    low = [rng.randrange(size) for size in shape]
    return Box(
        tuple(low), tuple(rng.randint(a + 1, size) for a, size in zip(low, shape, strict=True))
    )


@pytest.mark.parametrize("shape", [(), (30,), (6, 40), (3, 20, 5)], ids=str)
@pytest.mark.parametrize("num_boxes", [0, 1, 2, 3, 40])
def test_an_index_finds_the_boxes_that_a_scan_finds(shape: tuple[int, ...], num_boxes: int) -> None:
    rng = random.Random(f"{shape} {num_boxes}")
    boxes = [random_box(rng, shape) for _ in range(num_boxes)]
    index = BoxIndex(boxes)
    for wanted in (random_box(rng, shape) for _ in range(50)):
        scanned = [(i, c) for i, box in enumerate(boxes) if (c := box.intersect(wanted))]
        assert index.meeting(wanted) == scanned
        assert index.uncovered(wanted) == uncovered([wanted], boxes)
