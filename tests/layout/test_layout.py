"""Laws of layouts: boxes tile, equal placements are equal objects, text round-trips."""

from __future__ import annotations

import random
from itertools import permutations
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import rvdcomm as rv
from rvdcomm.layout import Box, balanced_cuts, chunk_cuts, parse_ranges, ranges_text
from tests.oracle import all_rvds, sliced
from tests.strategies import layouts, seeds

SHAPES = [(), (7,), (6, 10), (6, 10, 14), (3, 1, 5, 2), (2, 3, 2, 1, 4), (2, 3, 1, 2, 2, 3)]
"""0 to 6 dims."""


def cells_by_slot(layout: rv.Layout) -> dict[tuple[int, int], list[Box]]:
    """Boxes of every (replica, part)."""
    found: dict[tuple[int, int], list[Box]] = {}
    for rank in layout.ranks:
        cell = layout.cell(rank)
        found.setdefault((cell.replica, cell.part), []).append(cell.box)
    return found


def times_covered(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    count = np.zeros(shape, dtype=int)
    for box in boxes:
        sliced(count, box)[...] += 1
    return count


# --- cells --------------------------------------------------------------------------------------


@given(layouts())
def test_boxes_of_every_replica_and_part_tile_the_tensor(layout: rv.Layout) -> None:
    covers = [times_covered(layout.shape, boxes) for boxes in cells_by_slot(layout).values()]
    assert all((cover == 1).all() for cover in covers)


@pytest.mark.parametrize("shape", SHAPES, ids=len)
def test_boxes_tile_tensors_of_0_to_6_dims_for_every_rvd(shape: tuple[int, ...]) -> None:
    found = [cells_by_slot(rv.Layout(shape, rvd)) for rvd in all_rvds(4, len(shape))]
    covers = [times_covered(shape, boxes) for slots in found for boxes in slots.values()]
    assert all((cover == 1).all() for cover in covers)


def test_ranks_are_numbered_with_r_outermost_and_the_last_dim_innermost() -> None:
    layout = rv.Layout((4, 6), "R(2)V(2)D(2,3)", ranks=range(24))
    cells = [layout.cell(rank) for rank in (0, 1, 3, 6, 12)]
    assert cells == [
        rv.Cell(0, 0, Box((0, 0), (2, 2))),
        rv.Cell(0, 0, Box((0, 2), (2, 4))),
        rv.Cell(0, 0, Box((2, 0), (4, 2))),
        rv.Cell(0, 1, Box((0, 0), (2, 2))),
        rv.Cell(1, 0, Box((0, 0), (2, 2))),
    ]


def test_pieces_beyond_the_last_element_are_empty() -> None:
    layout = rv.Layout((3,), "R(1)V(1)D(5)")
    assert [layout.cell(rank).box.shape for rank in range(5)] == [(1,), (1,), (1,), (0,), (0,)]


def test_layout_contains_exactly_its_ranks() -> None:
    layout = rv.Layout((6,), "R(1)V(1)D(3)", ranks=[4, 9, 2])
    assert [rank for rank in range(12) if rank in layout] == [2, 4, 9]


@given(layouts())
def test_placement_has_the_parts_and_boxes_of_the_cells(layout: rv.Layout) -> None:
    held = {
        rank: (holding.part, holding.boxes)
        for holding in layout.placement.holdings
        for rank in holding.ranks
    }
    cells = {rank: layout.cell(rank) for rank in layout.ranks}
    assert held == {rank: (cell.part, (cell.box,)) for rank, cell in cells.items()}


# --- cuts ---------------------------------------------------------------------------------------

SIZES_AND_COUNTS = [
    *[(0, 1), (0, 5), (1, 1), (1, 8), (2, 3), (3, 2), (4, 4), (5, 3), (6, 4), (7, 8), (8, 7)],
    *[(9, 4), (10, 6), (11, 5), (12, 8), (12, 6), (13, 7), (14, 8), (14, 1)],
]


@pytest.mark.parametrize("size, count", SIZES_AND_COUNTS)
def test_chunk_cuts_are_those_of_torch_chunk(size: int, count: int) -> None:
    chunks = [len(chunk) for chunk in torch.zeros(size).chunk(count)]
    # torch leaves out the empty chunks at the end.
    want = [0, *np.cumsum(chunks + [0] * (count - len(chunks))).tolist()]
    assert list(chunk_cuts(size, count)) == want


@pytest.mark.parametrize("size, count", SIZES_AND_COUNTS)
def test_balanced_cuts_are_those_of_array_split(size: int, count: int) -> None:
    pieces = [len(piece) for piece in np.array_split(np.zeros(size), count)]
    assert list(balanced_cuts(size, count)) == [0, *np.cumsum(pieces).tolist()]


@pytest.mark.parametrize(
    "cuts, want",
    [
        ("chunk", [(0, 4, 8, 10)]),
        ("balanced", [(0, 4, 7, 10)]),
        ([[0, 0, 9, 10]], [(0, 0, 9, 10)]),
        ([np.array([0, 1, 1, 10])], [(0, 1, 1, 10)]),
    ],
    ids=["chunk", "balanced", "explicit", "numpy"],
)
def test_cuts_may_be_a_rule_or_cut_points(cuts: object, want: list[tuple[int, ...]]) -> None:
    assert rv.Layout((10,), "R(1)V(1)D(3)", cuts=cuts).cuts == tuple(want)


# --- canonical ----------------------------------------------------------------------------------


def meaning(layout: rv.Layout) -> frozenset[tuple[Box, frozenset[frozenset[int]]]]:
    """For every box, the sets of ranks that hold one part each; for an empty box, all its ranks."""
    holders: dict[Box, dict[int, set[int]]] = {}
    for rank in layout.ranks:
        cell = layout.cell(rank)
        part = -1 if cell.box.is_empty else cell.part
        holders.setdefault(cell.box, {}).setdefault(part, set()).add(rank)
    return frozenset(
        (box, frozenset(map(frozenset, parts.values()))) for box, parts in holders.items()
    )


CANONICAL_CASES = [
    *[((6, 10), rvd, "chunk") for rvd in map(str, all_rvds(4, 2))],
    *[((6,), rvd, "chunk") for rvd in map(str, all_rvds(6, 1))],
    ((3,), "R(1)V(1)D(5)", "chunk"),
    ((3,), "R(1)V(2)D(3)", [[0, 0, 3, 3]]),
    ((3,), "R(2)V(1)D(3)", [[0, 2, 2, 3]]),
    ((3, 2), "R(1)V(1)D(2,3)", [[0, 3, 3], [0, 1, 2, 2]]),
    ((0,), "R(1)V(2)D(3)", "chunk"),
    ((0, 5), "R(2)V(1)D(1,3)", "balanced"),
]


@pytest.mark.parametrize("shape, rvd, cuts", CANONICAL_CASES)
def test_layouts_are_equal_if_and_only_if_their_placements_are_equivalent(
    shape: tuple[int, ...], rvd: str, cuts: object
) -> None:
    num_ranks = rv.RVD(rvd).num_ranks
    all_orders = [rv.Layout(shape, rvd, order, cuts) for order in permutations(range(num_ranks))]
    pairs = {(layout, meaning(layout)) for layout in all_orders}
    assert len(pairs) == len({a for a, _ in pairs}) == len({b for _, b in pairs})


@given(layouts(), seeds)
def test_permuted_replicas_parts_and_idle_ranks_give_an_equal_layout(
    layout: rv.Layout, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rvd = layout.rvd
    array = np.array(layout.ranks).reshape(rvd.r, rvd.v, -1)
    boxes = [layout.box(index) for index in np.ndindex(*rvd.d)]
    for i in range(len(boxes)):
        array[:, :, i] = rng.permutation(array[:, rng.permutation(rvd.v), i], axis=0)
    for empty in {box for box in boxes if box.is_empty}:
        idle = [i for i, box in enumerate(boxes) if box == empty]
        array[:, :, idle] = rng.permutation(array[:, :, idle].reshape(-1)).reshape(rvd.r, rvd.v, -1)
    permuted = rv.Layout(layout.shape, rvd, array.reshape(-1), layout.cuts)
    assert (permuted, hash(permuted)) == (layout, hash(layout))


@pytest.mark.parametrize(
    "other",
    [
        rv.Layout((10, 6), "R(1)V(2)D(2,1)"),
        rv.Layout((6, 10), "R(1)V(2)D(1,2)"),
        rv.Layout((6, 10), "R(1)V(2)D(2,1)", ranks=[0, 2, 1, 3]),
        rv.Layout((6, 10), "R(1)V(2)D(2,1)", ranks=[0, 1, 2, 4]),
        rv.Layout((6, 10), "R(1)V(2)D(2,1)", cuts=[[0, 2, 6], [0, 10]]),
    ],
    ids=["shape", "rvd", "order", "ranks", "cuts"],
)
def test_layouts_that_differ_in_one_field_are_not_equal(other: rv.Layout) -> None:
    assert rv.Layout((6, 10), "R(1)V(2)D(2,1)") != other


# --- text ---------------------------------------------------------------------------------------


@given(layouts())
def test_parse_undoes_str(layout: rv.Layout) -> None:
    assert rv.Layout.parse(str(layout)) == layout


@pytest.mark.parametrize(
    "text, layout",
    [
        ("R(1)V(1)D() shape()", rv.Layout((), "R(1)V(1)D()")),
        ("R(2)V(1)D(1,2) shape(6,10)", rv.Layout((6, 10), "R(2)V(1)D(1,2)")),
        ("R(1)V(1)D(3) shape(7) ranks(4,2,9)", rv.Layout((7,), "R(1)V(1)D(3)", [4, 2, 9])),
        ("R(1)V(1)D(3) shape(7) ranks(2:5)", rv.Layout((7,), "R(1)V(1)D(3)", [2, 3, 4])),
        ("R(1)V(1)D(2) shape(7) cuts(balanced)", rv.Layout((7,), "R(1)V(1)D(2)", None, "balanced")),
        ("R(1)V(1)D(2) shape(7) cuts(0,1,7)", rv.Layout((7,), "R(1)V(1)D(2)", None, [[0, 1, 7]])),
    ],
)
def test_layout_text_may_omit_ranks_and_cuts(text: str, layout: rv.Layout) -> None:
    assert rv.Layout.parse(text) == layout


@pytest.mark.parametrize(
    "text",
    [
        "",
        "R(1)V(1)D(2)",
        "R(1)V(1)D(2) shape(7",
        "R(1)V(1)D(2) shape(7) ranks(a)",
        "R(1)V(1)D(2) ranks(0:2) shape(7)",
        "R(1)V(1)D(1,2) shape(4,,6)",
        "R(1)V(1)D(2) shape(7,)",
        "R(1)V(1)D(2) shape(7) cuts(0,,1,7)",
        "R(1)V(1)D(2) shape(7) cuts(0,1,7;)",
    ],
)
def test_parse_rejects_malformed_text(text: str) -> None:
    with pytest.raises(rv.LayoutError, match=r"cannot parse layout .*: expected the form 'R\(1\)"):
        rv.Layout.parse(text)


def test_parse_error_of_a_malformed_rvd_names_the_expected_token() -> None:
    with pytest.raises(rv.LayoutError, match=r"cannot parse layout 'R\(1\)D\(2\)': expected 'V\('"):
        rv.Layout.parse("R(1)D(2) shape(7)")


@given(st.lists(st.integers(0, 30), min_size=1, max_size=12))
def test_parse_ranges_undoes_ranges_text(ranks: list[int]) -> None:
    assert parse_ranges(ranges_text(ranks)) == tuple(ranks)


@pytest.mark.parametrize("text", ["", "0:", ":4", "0:4,", "0-4", "a", "-1", "0:4:2"])
def test_parse_ranges_rejects_malformed_text(text: str) -> None:
    with pytest.raises(rv.LayoutError, match=r"cannot parse ranks .*: expected the form '0:4,7,5'"):
        parse_ranges(text)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape, rvd, options, message",
    [
        ((6, -1), "R(1)V(1)D(1,1)", {}, r"shape \(6, -1\) has a negative size; use sizes of at le"),
        ((6, 10), "R(1)V(1)D(2)", {}, r"splits 1 dims but shape \(6, 10\) has 2; give D one count"),
        (
            (6, 10),
            "R(2)V(1)D(1,4)",
            {"ranks": range(6)},
            r"needs 8 ranks \(2\*1\*1\*4\) but 6 were given: \(0, 1, 2, 3, 4, 5\)\.",
        ),
        ((6,), "R(1)V(1)D(3)", {"ranks": [4, 2, 4]}, r"over ranks \(4, 2, 4\): rank 4 is given tw"),
        ((6,), "R(1)V(1)D(2)", {"ranks": [0, -3]}, r"over ranks \(0, -3\): rank -3 is negative\."),
        (
            (6,),
            "R(1)V(1)D(2)",
            {"cuts": "even"},
            "cuts='even' is no rule; use 'chunk', 'balanced'",
        ),
        (
            (6, 10),
            "R(1)V(1)D(2,1)",
            {"cuts": [[0, 3, 6]]},
            r"cuts of 1 dims given for shape \(6, 10\); give one a dim\.",
        ),
    ],
)
def test_shape_counts_ranks_and_cuts_that_do_not_fit_are_rejected(
    shape: tuple[int, ...], rvd: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(rv.LayoutError, match=message):
        rv.Layout(shape, rvd, **options)


@pytest.mark.parametrize(
    "cut", [[0, 6], [0, 2, 3, 6], [1, 3, 6], [0, 3, 5], [0, 7, 6], [0, -1, 6], []], ids=str
)
def test_invalid_cut_points_are_rejected(cut: list[int]) -> None:
    with pytest.raises(rv.LayoutError) as raised:
        rv.Layout((10, 6), "R(1)V(1)D(1,2)", cuts=[[0, 10], cut])
    assert str(raised.value) == (
        f"cut points {cut} of dim 1 do not cut 6 elements in 2; "
        "give 3 points in ascending order from 0 to 6."
    )


def test_cell_of_a_rank_outside_the_layout_is_rejected() -> None:
    message = r"rank 9 is not in R\(1\)V\(1\)D\(2\) shape\(6\) ranks\(0,1\)\."
    with pytest.raises(rv.LayoutError, match=message):
        rv.Layout((6,), "R(1)V(1)D(2)").cell(9)


def test_layout_errors_are_value_errors() -> None:
    assert issubclass(rv.LayoutError, ValueError)


def test_rank_order_is_kept_if_there_is_one_replica_and_part() -> None:
    order = random.Random(0).sample(range(40), 12)
    assert rv.Layout((6, 10), "R(1)V(1)D(3,4)", ranks=order).ranks == tuple(order)
