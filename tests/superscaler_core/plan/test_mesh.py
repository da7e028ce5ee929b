"""Meshes: text form, and splits whose parts tile the loops."""

from __future__ import annotations

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.plan.mesh import Mesh


@pytest.mark.parametrize("text", ["x:2", "x:2,y:4", "data:3,tensor:1,z_2:5"])
def test_mesh_round_trips_through_its_text(text: str) -> None:
    assert str(Mesh.parse(text)) == text


def test_semicolons_may_stand_for_commas() -> None:
    assert Mesh.parse("rows:2;cols:4") == Mesh.parse("rows:2, cols:4")


@pytest.mark.parametrize("cuts", [{}, {"b": ("y",)}, {"b": ("y", "x")}, {"b": ("x",), "n": ("y",)}])
def test_the_parts_of_a_split_tile_its_loops(cuts: dict[str, tuple[str, ...]]) -> None:
    mesh, sizes = Mesh.parse("x:2,y:3"), {"b": 7, "n": 5, "k": 4}
    found = mesh.split(sizes, cuts, range(6)).parts
    cells = [
        (b, n, part.replica)
        for part in found
        for ranges in [{loop: range(lo, hi) for loop, lo, hi in part.pieces}]
        for b in ranges.get("b", range(7))
        for n in ranges.get("n", range(5))
    ]
    num_copies = 6 // mesh.num_pieces(tuple(axis for axes in cuts.values() for axis in axes))
    assert sorted(cells) == [
        (b, n, i) for b in range(7) for n in range(5) for i in range(num_copies)
    ]


def test_the_first_axis_of_a_dim_is_the_outer_one() -> None:
    mesh = Mesh.parse("x:2,y:2")
    first = [part.pieces[0][1] for part in mesh.split({"b": 8}, {"b": ("y", "x")}, range(4)).parts]
    assert first == [0, 4, 2, 6]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2x4", "cannot parse mesh '2x4': expected NAME:DEVICES, such as x:2,y:4"),
        ("x:2,x:2", "distinct names"),
        ("x:0", "at least one device"),
        ("", "cannot parse mesh"),
    ],
)
def test_invalid_mesh_text_raises_plan_error(text: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        Mesh.parse(text)
