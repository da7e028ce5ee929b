"""Laws of views: the same elements in the same order, as boxes of other dims."""

from __future__ import annotations

import random
from math import prod

import numpy as np
import pytest
from hypothesis import given

from rvdcomm.errors import LayoutError
from rvdcomm.layout import Box, View
from rvdcomm.layout.box import MAX_DIMS
from tests.strategies import seeds


def random_view(rng: random.Random) -> View:
    """Up to 3 dims of up to 3 parts each."""
    sizes = [
        [rng.randint(1, 4) for _ in range(rng.randint(1, 3))] for _ in range(rng.randint(1, 3))
    ]
    return View(tuple(map(tuple, sizes)))


def random_box(rng: random.Random, view: View) -> Box:
    """A box of the tensor that is also a box of the view: in every dim, a range of one part."""
    ranges = []
    for sizes in view.parts:
        i = rng.randrange(len(sizes))
        inner = prod(sizes[i + 1 :])
        low = rng.randint(0, sizes[i])
        place = rng.randrange(prod(sizes[:i])) * sizes[i]
        ranges.append(((place + low) * inner, (place + rng.randint(low, sizes[i])) * inner))
    return Box(tuple(low for low, _ in ranges), tuple(high for _, high in ranges))


@given(seeds)
def test_a_box_of_a_view_has_the_same_elements_in_the_same_order(seed: int) -> None:
    rng = random.Random(seed)
    view = random_view(rng)
    box = random_box(rng, view)
    tensor = np.arange(prod(view.shape)).reshape(view.shape)
    viewed = tensor.reshape([size for sizes in view.parts for size in sizes])
    got = viewed[view.box(box).slices_within(Box.of_shape(viewed.shape))]
    assert (
        got.ravel().tolist() == tensor[box.slices_within(Box.of_shape(view.shape))].ravel().tolist()
    )


@given(seeds)
def test_strides_of_a_view_address_the_same_elements(seed: int) -> None:
    rng = random.Random(seed)
    view = random_view(rng)
    box = random_box(rng, view)
    # A shard with permuted dims that takes every other element of its memory.
    order = rng.sample(range(len(box.lo)), len(box.lo))
    memory = np.arange(2 * box.num_elements).reshape([*(box.shape[d] for d in order), 2])[..., 0]
    shard = memory.transpose(np.argsort(order))
    strides = view.strides(shard.strides, box)
    got = np.lib.stride_tricks.as_strided(shard, view.box(box).shape, strides)
    assert got.ravel().tolist() == shard.ravel().tolist()


@given(seeds)
def test_parse_undoes_str(seed: int) -> None:
    view = random_view(random.Random(seed))
    assert View.parse(str(view)) == view


@pytest.mark.parametrize("text", ["", "()", "(3", "(3,)(5)", "(3)x(5)", "(-1)", "(3)(5)\n"])
def test_parse_rejects_malformed_text(text: str) -> None:
    with pytest.raises(LayoutError, match="cannot parse dims"):
        View.parse(text)


def test_range_that_is_no_box_of_the_view_is_rejected() -> None:
    with pytest.raises(LayoutError, match="no box of the parts"):
        View(((3, 4),)).box(Box((2,), (6,)))


@pytest.mark.parametrize("parts", [((2, 0),), ((1,),) * (MAX_DIMS + 1)], ids=["empty", "many"])
def test_views_with_empty_or_too_many_dims_are_rejected(parts: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(LayoutError, match="at most"):
        View(parts)


def test_every_fourth_row_is_a_box_of_the_reshaped_array() -> None:
    rows = np.arange(12 * 5).reshape(12, 5)[1::4]
    view = View(((3, 4), (5,)))
    boxes = [view.box(Box((row, 0), (row + 1, 5))) for row in range(1, 12, 4)]
    low, high = boxes[0].lo, boxes[-1].hi
    assert (low, high) == ((0, 1, 0), (3, 2, 5))
    viewed = np.arange(12 * 5).reshape(3, 4, 5)[tuple(map(slice, low, high))]
    assert viewed.ravel().tolist() == rows.ravel().tolist()
