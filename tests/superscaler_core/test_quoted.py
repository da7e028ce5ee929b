"""Names and texts of a model become Python source in one place, and stay what they are."""

from __future__ import annotations

import ast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from superscaler_core.quoted import commented, literal, quoted

TEXTS = ["head one", "it's", 'a "b"', "a\\b", "a\\", 'b\\"', "a\nprint('run')\n#", '"""', "{x0}",
         "\\{x0}", "\ufb01", "\u2028", "\ud800", "\0", "class"]  # fmt: skip


def check(text: str) -> None:
    made = quoted(text)
    assert ast.literal_eval(made) == text
    assert ast.literal_eval(made.format(x0="other")) == text
    assert len(made.splitlines()) == 1
    assert made.isascii()
    lines = f'"""{commented(text)}"""\nx = 1  # {commented(text)}\n'
    assert [type(node) for node in ast.parse(lines).body] == [ast.Expr, ast.Assign]


@pytest.mark.parametrize("text", TEXTS)
def test_quoted_text_is_one_literal_that_python_reads_as_the_text(text: str) -> None:
    check(text)


@given(st.text())
def test_any_quoted_text_is_one_literal(text: str) -> None:
    check(text)


@pytest.mark.parametrize(
    "value",
    [[1, "a", None], (1,), ((2, "b"), []), {"a\n": ("x", None)}, True, -1.5, "sum", float("inf")],
)
def test_python_reads_a_literal_as_the_value(value: object) -> None:
    assert eval(literal(value)) == value
