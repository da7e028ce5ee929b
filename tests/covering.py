"""Covering arrays: few cases of a product of arguments, in which all pairs of values occur.

A fault that needs a certain value, or two values together, is found by them as by the whole product
(Kuhn et al., Software fault interactions and implications for software testing, 2004: nearly all
faults are of this kind). All cases that exist are run; nothing is left out at run time.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import combinations, product
from random import Random
from typing import Any

import pytest

MOST = 4096
"""Of larger products, so many random rows are looked through for each row that is chosen."""

Row = tuple[int, ...]


def covering_rows(sizes: tuple[int, ...]) -> list[Row]:
    """Rows of indices, the same every time, in which every pair of two columns' values occurs.

    Each row is the one with most pairs that no row before it has (a greedy algorithm).
    """
    left = set(_pairs_of(sizes))
    if not left:
        return [*product(*map(range, sizes))]
    random, rows = Random(0), []
    while left:
        rows.append(max(_candidates(sizes, min(left), random), key=lambda row: _new(row, left)))
        left.difference_update(_pairs(rows[-1]))
    return rows


def covering(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the values of several arguments, so that every pair occurs.

    With one argument it is ``parametrize`` itself.
    """
    lists = [[*each] for each in values.values()]
    rows = covering_rows(tuple(map(len, lists)))
    cases = [tuple(each[i] for each, i in zip(lists, row, strict=True)) for row in rows]
    names = ",".join(values)
    return pytest.mark.parametrize(names, [row[0] for row in cases] if len(lists) == 1 else cases)


def each_value(**values: Iterable[Any]) -> pytest.MarkDecorator:
    """Parametrize a test by the values of several arguments, so that every value occurs.

    There are as many cases as the longest list has values; the other values repeat, in an order
    that is random but the same every time.
    """
    lists, random = [[*each] for each in values.values()], Random(0)
    num = max(map(len, lists))
    columns = [[each[i % len(each)] for i in range(num)] for each in lists]
    for column, each in zip(columns, lists, strict=True):
        if len(each) < num:
            random.shuffle(column)
    return pytest.mark.parametrize(",".join(values), [*zip(*columns, strict=True)])


Pair = tuple[int, int, int, int]
"""Two columns, and an index of each."""


def _pairs_of(sizes: tuple[int, ...]) -> Iterator[Pair]:
    for a, b in combinations(range(len(sizes)), 2):
        yield from ((a, b, i, j) for i in range(sizes[a]) for j in range(sizes[b]))


def _pairs(row: Row) -> Iterator[Pair]:
    for a, b in combinations(range(len(row)), 2):
        yield a, b, row[a], row[b]


def _new(row: Row, left: set[Pair]) -> int:
    return sum(pair in left for pair in _pairs(row))


def _candidates(sizes: tuple[int, ...], pair: Pair, random: Random) -> Iterator[Row]:
    """Rows with a given pair: all of them, or random ones if there are many."""
    a, b, i, j = pair
    free = [[i] if n == a else [j] if n == b else [*range(size)] for n, size in enumerate(sizes)]
    num = 1
    for each in free:
        num *= len(each)
    if num <= MOST:
        yield from product(*free)
        return
    for _ in range(MOST // 16):
        yield tuple(random.choice(each) for each in free)
