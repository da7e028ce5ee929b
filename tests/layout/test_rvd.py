"""Laws of RVDs: text and counts."""

from __future__ import annotations

from math import comb, prod

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


@pytest.mark.parametrize("text", ["R(2)V(1)D(1,4)", "R(1)V(2)D()", "R(12)V(3)D(10)"])
def test_str_undoes_parse(text: str) -> None:
    assert str(RVD(text)) == text


def test_rvd_from_text_equals_rvd_from_counts() -> None:
    assert RVD("R(2)V(3)D(1,4)") == RVD(2, 3, (1, 4))


def test_rvd_of_an_rvd_is_itself() -> None:
    assert RVD(RVD("R(2)V(3)D(1,4)")) == RVD("R(2)V(3)D(1,4)")


def test_equal_rvds_hash_equally() -> None:
    assert hash(RVD("R(2)V(3)D(1,4)")) == hash(RVD(2, 3, (1, 4)))


def test_rvd_is_frozen() -> None:
    with pytest.raises(AttributeError):
        RVD("R(1)V(1)D(1)").r = 2  # type: ignore[misc]


@given(COUNTS, COUNTS, st.lists(COUNTS, max_size=6))
def test_num_ranks_is_the_product_of_all_counts(r: int, v: int, d: list[int]) -> None:
    assert RVD(r, v, tuple(d)).num_ranks == r * v * prod(d)


def test_counts_are_in_the_order_of_the_rank_numbering() -> None:
    assert RVD("R(2)V(3)D(5,7)").counts == (2, 3, 5, 7)


@pytest.mark.parametrize("exponent, num_dims", [(3, 2), (3, 3), (2, 1), (10, 3)])
def test_all_rvds_of_a_power_of_two_have_the_expected_number(exponent: int, num_dims: int) -> None:
    # By hand: 8 ranks 2-d: 20, 1024 ranks 3-d: 1001.
    want = comb(exponent + num_dims + 1, num_dims + 1)
    assert len(set(all_rvds(2**exponent, num_dims))) == want


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
