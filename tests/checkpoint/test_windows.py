from __future__ import annotations

from itertools import pairwise, product

import numpy as np
import pytest

from rvdcomm.checkpoint.reader import runs
from rvdcomm.checkpoint.windows import windows
from rvdcomm.layout import Box
from tests.covering import each_value

SHAPES = [(), (1,), (7,), (0, 3), (3, 0), (4, 5), (1, 5, 1), (3, 1, 4), (2, 3, 5), (3, 2, 1, 3)]


def boxes_of(shape: tuple[int, ...]) -> list[Box]:
    """All boxes, empty ones too."""
    ranges = [[(a, b) for a in range(n + 1) for b in range(a, n + 1)] for n in shape]
    return [Box(tuple(a for a, _ in r), tuple(b for _, b in r)) for r in product(*ranges)]


@each_value(shape=SHAPES + SHAPES[-5:], most=[1, 2, 3, 4, 7, 1000])
def test_windows_tile_the_tensor(shape: tuple[int, ...], most: int) -> None:
    counts = np.zeros(shape, int)
    whole = Box.of_shape(shape)
    for window in windows(shape, most):
        assert 0 < window.num_elements <= most
        counts[window.slices_within(whole)] += 1
    assert (counts == 1).all()


@each_value(shape=SHAPES + SHAPES[-5:], most=[1, 3, 4, 1000])
def test_windows_cut_every_box_into_consecutive_runs(shape: tuple[int, ...], most: int) -> None:
    for box in boxes_of(shape):
        position = 0
        for window in windows(shape, most):
            common = window.intersect(box)
            if common is not None:
                assert list(runs(common, box)) == [(position, common.num_elements)]
                position += common.num_elements
        assert position == box.num_elements


@pytest.mark.parametrize("shape", SHAPES)
def test_the_first_window_is_the_largest(shape: tuple[int, ...]) -> None:
    for most in range(1, 40):
        sizes = [window.num_elements for window in windows(shape, most)]
        assert sizes[:1] == [max(sizes)] if sizes else shape.count(0)


@pytest.mark.parametrize("shape", SHAPES)
def test_runs_are_the_elements_of_a_box_in_order(shape: tuple[int, ...]) -> None:
    whole = Box.of_shape(shape)
    flat = np.arange(whole.num_elements).reshape(shape)
    for box in boxes_of(shape):
        found = [i for start, length in runs(box, whole) for i in range(start, start + length)]
        assert found == flat[box.slices_within(whole)].reshape(-1).tolist()


@pytest.mark.parametrize("shape", SHAPES)
def test_adjacent_runs_are_merged(shape: tuple[int, ...]) -> None:
    for box in boxes_of(shape):
        found = list(runs(box, Box.of_shape(shape)))
        assert all(start + length < after for (start, length), (after, _) in pairwise(found))
