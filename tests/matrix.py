"""Matrices of test cases: ``make test`` runs some cases of each large matrix.

``make test`` sets ``RVDCOMM_TESTS=some``. Without this variable, for example when pytest is started
by hand, all cases run. If a test has one case per item of a list, such as all pages, it is marked
``every``, and all its cases always run.
"""

from __future__ import annotations

import os
import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping
from math import ceil
from typing import Any, TypeVar
from zlib import crc32

import pytest

One = TypeVar("One")

LEAST, LEAST_SPAWNED = 6, 4
"""Least numbers of cases of a test that run; the second one is for tests that spawn processes."""

SHARE = 8
"""One in ``SHARE`` cases of a test with many cases runs."""

COVERED = 3
"""If an argument has at least this many cases per value on average, all its values occur."""

FEWER = 3
"""``make test`` divides the number of random examples of a test by ``FEWER``."""


def is_whole() -> bool:
    """Whether all cases run."""
    return os.environ.get("RVDCOMM_TESTS") != "some"


def part(cases: Iterable[One], of: int = 2) -> list[One]:
    """Every ``of``-th case, for a loop inside a test; all cases if ``is_whole()``."""
    return [*cases][:: 1 if is_whole() else of]


def fewer(num: int) -> int:
    """How many of ``num`` examples a test draws; all if ``is_whole()``."""
    return num if is_whole() else -(-num // FEWER)


def some(cases: Mapping[str, Mapping[str, Any]], least: int) -> set[str]:
    """The ids of the cases that ``make test`` runs of one test.

    They are chosen by checksums of the ids, so that all processes and runs choose the same cases.
    Every value of an argument occurs if the argument has at least ``COVERED`` cases per value on
    average.

    Args:
        cases: the arguments of every case, by the case's id.
        least: least number of cases to run; a test with fewer cases runs all of them.
    """
    num = max(least, ceil(len(cases) / SHARE))
    if num >= len(cases):
        return {*cases}
    values = {
        case: {(name, _key(value)) for name, value in args.items()} for case, args in cases.items()
    }
    every = set().union(*values.values())
    nums = Counter(name for name, _ in every)
    missing = {each for each in every if COVERED * nums[each[0]] <= len(cases)}
    order = sorted(cases, key=lambda case: crc32(case.encode()))
    chosen: set[str] = set()
    for case in order:
        if values[case] & missing:
            chosen.add(case)
            missing -= values[case]
    for case in order:
        if len(chosen) >= num:
            break
        chosen.add(case)
    return chosen


def _key(value: Any) -> Hashable:
    """A key that is equal for equal values of an argument."""
    try:
        hash(value)
    except TypeError:
        return id(value)
    return type(value), value


def _words(case: str) -> dict[str, Any]:
    """The words of a case's id, by position; ``left_out`` treats them as further arguments.

    One argument may be a value with several parts, and the id shows these parts.
    """
    return {f"word {place}": word for place, word in enumerate(re.split("[ -]", case))}


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """The collected cases that ``make test`` does not run."""
    tests: dict[str, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        if hasattr(item, "callspec") and item.get_closest_marker("every") is None:
            tests[item.nodeid.split("[")[0]][item.callspec.id] = item
    found: set[pytest.Item] = set()
    for cases in tests.values():
        is_spawned = any(item.get_closest_marker("dist") for item in cases.values())
        args = {name: item.callspec.params | _words(name) for name, item in cases.items()}
        chosen = some(args, LEAST_SPAWNED if is_spawned else LEAST)
        found |= {item for name, item in cases.items() if name not in chosen}
    return found
