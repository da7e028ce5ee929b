"""Matrices of cases: ``make test`` runs a part of the largest, with every row and every column.

With ``RVDCOMM_TESTS=all`` in the environment it runs all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import TypeVar

One = TypeVar("One")
Other = TypeVar("Other")


def is_whole() -> bool:
    """Whether all cases are asked for."""
    return os.environ.get("RVDCOMM_TESTS") == "all"


def part(cases: Iterable[One], of: int = 2) -> list[One]:
    """Every ``of``-th case."""
    return [*cases][:: 1 if is_whole() else of]


def pairs(rows: Iterable[One], columns: Iterable[Other], of: int = 2) -> list[tuple[One, Other]]:
    """One of ``of`` pairs, in turn: each row has some columns, and each column some rows."""
    numbered = product(enumerate(rows), enumerate(columns))
    step = 1 if is_whole() else of
    return [(row, column) for (i, row), (j, column) in numbered if (i + j) % step == 0]
