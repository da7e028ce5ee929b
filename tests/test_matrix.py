"""The cases that ``make test`` runs: some of every test, with every row and column."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.matrix import LEAST_SPAWNED, SHARE, is_whole, left_out, part, some


@pytest.mark.parametrize("num_rows, num_columns, least", [(8, 9, 12), (40, 5, 12), (6, 6, 4)])
def test_selected_cases_cover_every_row_and_column(
    num_rows: int, num_columns: int, least: int
) -> None:
    rows = [[i] for i in range(num_rows)]  # Lists are values that cannot be hashed.
    cases = {
        f"{row}-{column}": {"row": row, "column": column, "other": object()}
        for row, column in product(rows, range(num_columns))
    }
    found = [cases[name] for name in some(cases, least)]
    assert sorted({each["row"][0] for each in found}) == [*range(num_rows)]
    assert {each["column"] for each in found} == {*range(num_columns)}
    assert max(least, len(cases) / SHARE) <= len(found) <= len(cases) / 2


def test_all_cases_run_if_there_are_few() -> None:
    cases = {str(i): {"i": i} for i in range(7)}
    assert some(cases, 7) == {*cases}
    assert len(some(cases, 4)) == 4


@pytest.mark.parametrize("text, num", [("some", 2), ("all", 4), ("", 4)])
def test_environment_variable_selects_some_or_all_cases(
    text: str, num: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RVDCOMM_TESTS", text)
    assert is_whole() == (text != "some")
    assert len(part("abcd")) == num


@dataclass(frozen=True)
class Item:
    """The attributes of a collected test that ``left_out`` reads."""

    test: str
    case: int
    markers: frozenset[str] = frozenset()

    @property
    def nodeid(self) -> str:
        return f"{self.test}[{self.case}]"

    @property
    def callspec(self) -> Any:
        return SimpleNamespace(id=str(self.case), params={"case": self.case})

    def get_closest_marker(self, name: str) -> str | None:
        return name if name in self.markers else None


def test_inventories_run_completely_and_large_matrices_in_part() -> None:
    nums = {"large": 96, "small": 6, "inventory": 80, "spawned": 12}
    markers = {"inventory": frozenset({"every"}), "spawned": frozenset({"dist"})}
    items: list[Any] = [
        Item(test, case, markers.get(test, frozenset()))
        for test, num in nums.items()
        for case in range(num)
    ]
    out = left_out(items)
    kept = Counter(item.test for item in items if item not in out)
    assert kept == {"large": 96 // SHARE, "small": 6, "inventory": 80, "spawned": LEAST_SPAWNED}


def test_makefile_lists_all_places_of_tests_that_spawn_processes() -> None:
    root = Path(__file__).parents[1]
    listed = re.search(r"^WORLD_TESTS := ((?:.*\\\n)*.*)", (root / "Makefile").read_text(), re.M)
    places = [root / word for word in listed[1].replace("\\", " ").split()]
    assert all(place.exists() for place in places)
    marked = [
        path
        for path in (root / "tests").rglob("test_*.py")
        if re.search(r"mark\.(dist|alone|cluster)\b", path.read_text(encoding="utf-8"))
    ]
    assert len(marked) > 30
    for path in marked:
        assert any(path.is_relative_to(place) for place in places), path
