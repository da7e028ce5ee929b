"""What ``make test`` runs: a part of a matrix has every row and column, and no test is left out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.matrix import pairs, part


@pytest.mark.parametrize("of", [2, 3])
def test_every_row_and_column_occurs(of: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RVDCOMM_TESTS", raising=False)
    found = pairs("abcd", range(6), of)
    assert len(found) == 24 // of
    assert {row for row, _ in found} == set("abcd")
    assert {column for _, column in found} == set(range(6))


def test_all_can_be_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RVDCOMM_TESTS", "all")
    assert part("abcd") == ["a", "b", "c", "d"]
    assert len(pairs("ab", "cd")) == 4


def test_make_looks_for_tests_that_spawn_wherever_there_are_some() -> None:
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
