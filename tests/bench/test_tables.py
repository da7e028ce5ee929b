"""Laws of tables."""

from __future__ import annotations

from bench.tables import grid, markdown


def test_number_columns_are_right_aligned() -> None:
    text = markdown([["name", "x", "of"], ["3F1B", "1.5 x", "97%"], ["b", "-", "1e+03"]])
    assert text.splitlines()[1] == "| --- | ---: | ---: |"
    assert grid([["name", "x"], ["3F1B", "0.5"]]) == "name    x\n3F1B  0.5"
    assert grid([["a name", "long"], ["3F1B", "0.5"]]) == "a name  long\n3F1B     0.5"


def test_header_without_rows_is_a_table() -> None:
    assert grid([["name", "x"]]) == "name  x"
    assert markdown([["name", "x"]]) == "| name | x |\n| --- | --- |"
