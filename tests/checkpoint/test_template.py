from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rvdcomm as rv
from rvdcomm.checkpoint.template import Template

TEXTS = st.text("ab.*#1", max_size=8)


@given(TEXTS, st.text("ab.1", max_size=12))
def test_a_match_filled_in_is_the_name(text: str, name: str) -> None:
    found = Template(text).match(name)
    if found is not None:
        assert Template(text).filled(found) == name


@given(TEXTS, st.lists(st.sampled_from(["a", "b.a", "1"]), min_size=8, max_size=8))
def test_a_filled_template_matches(text: str, values: list[str]) -> None:
    template = Template(text)
    texts = ["12" if w == "#" else v for w, v in zip(template.wildcards, values, strict=False)]
    name = template.filled(tuple(texts))
    if "#" not in text:
        assert template.match(name) is not None


@pytest.mark.parametrize(
    "text, name, expected",
    [
        ("*.w", "a.w.w", ("a.w",)),
        ("*.e.#.up", "l.1.e.12.up", ("l.1", "12")),
        ("#.#", "1.2", ("1", "2")),
        ("a[b]?", "a[b]?", ()),
        ("a*", "a\nb", ("\nb",)),
        ("*", "", None),
        ("w.#", "w.x", None),
        ("w", "ww", None),
    ],
)
def test_stars_match_texts_and_hashes_numbers(
    text: str, name: str, expected: tuple[str, ...] | None
) -> None:
    assert Template(text).match(name) == expected


@pytest.mark.timeout(20)
@pytest.mark.parametrize("text", ["*a" * 40 + "b", "#" * 40 + "b", "*#" * 20 + "b", "*#1#b"])
@pytest.mark.parametrize("char", ["a", "1"])
def test_match_takes_bounded_time(text: str, char: str) -> None:
    assert Template(text).match(char * 5_000) is None


def test_number_of_the_parts_is_the_last_one() -> None:
    assert Template("l.#.e.#.up").without_number(Template("l.#.e.up")) == 1
    with pytest.raises(rv.LayoutError, match=r"'\*' needs the wildcards of 'x', .* and one # more"):
        Template("*").without_number(Template("x"))
