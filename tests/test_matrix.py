"""A part of a matrix has every row and every column."""

from __future__ import annotations

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
