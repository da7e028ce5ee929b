"""Covering arrays: every pair of values occurs, in few rows."""

from __future__ import annotations

from itertools import combinations, product
from math import prod

import pytest

from tests.covering import covering, covering_rows, each_value

SIZES = [(), (4,), (3, 2), (3, 3, 3, 3), (7, 1, 5), (2,) * 12, (12, 9, 8, 7, 6)]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_pair_of_values_occurs(sizes: tuple[int, ...]) -> None:
    rows = covering_rows(sizes)
    for columns in combinations(range(len(sizes)), min(2, len(sizes))):
        found = {tuple(row[c] for c in columns) for row in rows}
        assert found == set(product(*(range(sizes[c]) for c in columns)))


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_rows_are_few_and_the_same_every_time(sizes: tuple[int, ...]) -> None:
    rows = covering_rows(sizes)
    assert rows == covering_rows(sizes)
    assert len(set(rows)) == len(rows) <= prod(sizes)
    if len(sizes) > 2:
        first, second = sorted(sizes)[-2:]
        assert len(rows) < 2.5 * first * second


@covering(a="xy", b=(1, 2, 3), c=[None, True])
def test_covering_is_a_parametrization(a: str, b: int, c: bool | None) -> None:
    assert (a in "xy", b in (1, 2, 3), c in (None, True)) == (True,) * 3


def test_each_value_occurs_in_as_few_cases_as_the_longest_list_has() -> None:
    lists = {"a": "xy", "b": (1, 2, 3, 5, 7), "c": [None, True, False]}
    mark = each_value(**lists).mark
    assert mark.args[0] == "a,b,c"
    columns = [*zip(*mark.args[1], strict=True)]
    assert list(map(set, columns)) == list(map(set, lists.values()))
    assert set(map(len, columns)) == {5}
