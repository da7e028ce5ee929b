"""Laws of boxes, checked against masks of small tensors."""

from __future__ import annotations

from itertools import pairwise, permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvdcomm.errors import LayoutError
from rvdcomm.layout import Box, merged
from tests.strategies import box_pairs, boxes

SIZE = 9
"""Extent of the tensors that the strategies draw boxes in."""


def mask(*parts: Box, num_dims: int) -> np.ndarray:
    """How often every element is in ``parts``."""
    count = np.zeros((SIZE,) * num_dims, dtype=int)
    for box in parts:
        count[box.slices_within(Box.of_shape(count.shape))] += 1
    return count


def indices(box: Box) -> list[tuple[int, ...]]:
    """Elements in row-major order."""
    return [tuple(a + b for a, b in zip(i, box.lo, strict=True)) for i in np.ndindex(*box.shape)]


# --- text ---------------------------------------------------------------------------------------


@given(boxes())
def test_parse_undoes_str(box: Box) -> None:
    assert Box.parse(str(box)) == box


@pytest.mark.parametrize(
    "text", ["", "[", "0:4", "[0:4", "[0-4]", "[0:4,]", "[:4]", "[a:b]", "[-1:2]"]
)
def test_parse_rejects_malformed_text(text: str) -> None:
    with pytest.raises(LayoutError, match=r"cannot parse box .*: expected the form '\[0:4,2:8\]'"):
        Box.parse(text)


# --- sizes --------------------------------------------------------------------------------------


@given(boxes())
def test_num_elements_counts_indices(box: Box) -> None:
    assert box.num_elements == len(indices(box))


@given(boxes())
def test_box_is_empty_if_it_has_no_elements(box: Box) -> None:
    assert box.is_empty == (box.num_elements == 0)


# --- sets ---------------------------------------------------------------------------------------


@given(box_pairs())
def test_intersect_is_the_set_intersection(pair: tuple[Box, Box]) -> None:
    a, b = pair
    common = a.intersect(b)
    assert set(indices(a)) & set(indices(b)) == set(indices(common) if common else [])


@given(box_pairs())
def test_intersect_never_returns_an_empty_box(pair: tuple[Box, Box]) -> None:
    common = pair[0].intersect(pair[1])
    assert common is None or not common.is_empty


@given(box_pairs())
def test_overlaps_is_symmetric_and_agrees_with_intersect(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.overlaps(b) == b.overlaps(a) == (a.intersect(b) is not None)


@given(box_pairs())
def test_contains_is_the_subset_relation(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert b.is_empty or a.contains(b) == (set(indices(b)) <= set(indices(a)))


@given(box_pairs())
def test_subtract_tiles_the_set_difference(pair: tuple[Box, Box]) -> None:
    a, b = pair
    num_dims = len(a.lo)
    rest = mask(*a.subtract(b), num_dims=num_dims)
    want = mask(a, num_dims=num_dims) * (1 - mask(b, num_dims=num_dims))
    assert np.array_equal(rest, want)


@given(box_pairs())
def test_subtract_yields_no_empty_box(pair: tuple[Box, Box]) -> None:
    a, b = pair
    assert a.is_empty or not any(box.is_empty for box in a.subtract(b))


@given(box_pairs())
def test_slices_within_select_the_elements_of_the_inner_box(pair: tuple[Box, Box]) -> None:
    outer, other = pair
    inner = outer.intersect(other)
    if inner is None:
        return
    flat = np.arange(SIZE ** len(outer.lo)).reshape((SIZE,) * len(outer.lo))
    whole = Box.of_shape(flat.shape)
    held = flat[(..., *outer.slices_within(whole))]
    assert np.array_equal(
        held[(..., *inner.slices_within(outer))], flat[(..., *inner.slices_within(whole))]
    )


# --- flat ranges --------------------------------------------------------------------------------


@given(boxes(), st.data())
def test_flat_range_yields_the_elements_in_row_major_order(box: Box, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, box.num_elements))
    stop = data.draw(st.integers(start, box.num_elements))
    got = [index for piece in box.flat_range(start, stop) for index in indices(piece)]
    assert got == indices(box)[start:stop]


@given(box_pairs())
def test_flat_offset_is_none_except_for_contiguous_runs(pair: tuple[Box, Box]) -> None:
    outer, other = pair
    inner = outer.intersect(other)
    if inner is None:
        return
    flat = {index: i for i, index in enumerate(indices(outer))}
    offsets = [flat[index] for index in indices(inner)]
    is_run = all(b == a + 1 for a, b in pairwise(offsets))
    assert inner.flat_offset_within(outer) == (offsets[0] if is_run else None)


# --- merging ------------------------------------------------------------------------------------

QUARTERS = (Box((0, 0), (2, 3)), Box((0, 3), (2, 7)), Box((2, 0), (5, 3)), Box((2, 3), (5, 7)))


@pytest.mark.parametrize("order", [*permutations(range(4))][::4])
def test_merged_joins_quarters_in_any_order(order: tuple[int, ...]) -> None:
    assert merged(QUARTERS[i] for i in order) == (Box((0, 0), (5, 7)),)


def test_merged_drops_empty_boxes() -> None:
    assert merged([Box((2, 2), (2, 5)), QUARTERS[0]]) == (QUARTERS[0],)


@pytest.mark.parametrize(
    "other",
    [QUARTERS[3], Box((0, 4), (2, 7)), Box((3, 0), (5, 3)), Box((2, 1), (5, 3))],
    ids=["across", "gap in a row", "gap in a column", "shifted"],
)
def test_merged_does_not_join_boxes_that_do_not_abut(other: Box) -> None:
    assert merged([other, QUARTERS[0]]) == (QUARTERS[0], other)


@given(boxes(num_dims=2), st.lists(st.integers(0, 81), max_size=4))
def test_merged_covers_each_element_of_its_boxes_once(box: Box, cuts: list[int]) -> None:
    bounds = [0, *sorted(min(cut, box.num_elements) for cut in cuts), box.num_elements]
    pieces = [piece for a, b in pairwise(bounds) for piece in box.flat_range(a, b)]
    assert np.array_equal(mask(*merged(pieces), num_dims=2), mask(box, num_dims=2))
