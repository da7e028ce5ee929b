"""Laws of RVDs: text and counts."""

from __future__ import annotations

from math import prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rvdcomm.errors import LayoutError
from rvdcomm.layout import RVD
from tests.oracle import all_rvds

COUNTS = st.integers(1, 40)


@given(COUNTS, COUNTS, st.lists(COUNTS, max_size=6))
def test_parse_undoes_str(r: int, v: int, d: list[int]) -> None:
    assert RVD.parse(str(RVD(r, v, tuple(d)))) == RVD(r, v, tuple(d))


def test_parse_undoes_str_for_every_rvd_of_24_ranks() -> None:
    rvds = all_rvds(24, 3)
    assert [RVD.parse(str(rvd)) for rvd in rvds] == rvds


@given(COUNTS, COUNTS, st.lists(COUNTS, max_size=6))
def test_num_ranks_is_the_product_of_all_counts(r: int, v: int, d: list[int]) -> None:
    assert RVD(r, v, tuple(d)).num_ranks == r * v * prod(d)


@pytest.mark.parametrize(
    "text, expected, column",
    [
        ("", "'R('", 1),
        ("R2V1D(1,4)", "'R('", 1),
        ("r(2)V(1)D(1)", "'R('", 1),
        ("R()V(1)D(1)", "a count", 3),
        ("R(-1)V(1)D(1)", "a count", 3),
        ("R(2V(1)D(1)", "')'", 4),
        ("R(2)D(1)", "'V('", 5),
        ("R(2) V(1)D(1)", "'V('", 5),
        ("R(2)V(x)D(1)", "a count", 7),
        ("R(2)V(1", "')'", 8),
        ("R(2)V(1)", "'D('", 9),
        ("R(2)V(1)D(1,)", "')'", 12),
        ("R(2)V(1)D(1 ,4)", "')'", 12),
        ("R(2)V(1)D(1,4)x", "the end", 15),
    ],
)
def test_parse_error_names_the_column_of_the_mistake(text: str, expected: str, column: int) -> None:
    # Columns count from 1.
    with pytest.raises(LayoutError) as raised:
        RVD(text)
    message = f"cannot parse layout {text!r}: expected {expected} at column {column}."
    assert str(raised.value) == message


@pytest.mark.parametrize("text", ["R(0)V(1)D(1)", "R(1)V(0)D(1)", "R(1)V(1)D(1,0)"])
def test_parse_rejects_zero_count(text: str) -> None:
    with pytest.raises(LayoutError, match="RVD counts must be integers of at least 1, got r="):
        RVD(text)


@pytest.mark.parametrize(
    "counts", [(0, 1, (1,)), (1, -2, (1,)), (1, 1, (2, 0)), (1, 1, (1.5,)), (2.0, 1, (1,))]
)
def test_counts_that_are_not_positive_integers_are_rejected(counts: tuple) -> None:
    with pytest.raises(LayoutError, match="RVD counts must be integers of at least 1"):
        RVD(*counts)


@pytest.mark.parametrize("counts", [(2,), (2, 1), (2, None, (1,))])
def test_missing_counts_are_rejected(counts: tuple) -> None:
    with pytest.raises(LayoutError, match=r"RVD\(2\) needs a text such as .*, or r, v and d"):
        RVD(*counts)
