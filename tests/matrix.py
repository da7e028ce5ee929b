"""Matrices of test cases: ``make test`` runs part of each large matrix, with all rows and columns.

With ``RVDCOMM_TESTS=all`` in the environment, all cases run.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from itertools import product
from typing import TypeVar

One = TypeVar("One")
Other = TypeVar("Other")


def is_whole() -> bool:
    """Whether all cases shall run."""
    return os.environ.get("RVDCOMM_TESTS") == "all"


def part(cases: Iterable[One], of: int = 2) -> list[One]:
    """Every ``of``-th case; all cases if ``is_whole()``."""
    return [*cases][:: 1 if is_whole() else of]


def pairs(rows: Iterable[One], columns: Iterable[Other], of: int = 2) -> list[tuple[One, Other]]:
    """Every ``of``-th pair, shifted from row to row so that each column occurs; or all pairs."""
    numbered = product(enumerate(rows), enumerate(columns))
    step = 1 if is_whole() else of
    return [(row, column) for (i, row), (j, column) in numbered if (i + j) % step == 0]
