from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rvdcomm as rv
from rvdcomm.checkpoint import Rules, Split, Transpose

TOML = """
ranks = "0:4"
[layouts]
"*.up.*" = "R(1)V(1)D(4,1)"
"*.weight" = "R(2)V(1)D(1,2) ranks(3,2,1,0) cuts(0,4;0,1,6)"
[rename]
'^model\\.' = ""
"layers" = "blocks"
"""
VALUES = {
    "ranks": "0:4",
    "layouts": {
        "*.up.*": "R(1)V(1)D(4,1)",
        "*.weight": "R(2)V(1)D(1,2) ranks(3,2,1,0) cuts(0,4;0,1,6)",
    },
    "rename": {r"^model\.": "", "layers": "blocks"},
}


@pytest.mark.parametrize(
    "name, layout",
    [
        ("a.up.weight", "R(1)V(1)D(4,1) shape(4,6) ranks(0:4)"),
        ("a.weight", "R(2)V(1)D(1,2) shape(4,6) ranks(1,0,3,2) cuts(0,4;0,1,6)"),
        ("A.WEIGHT", "R(4)V(1)D(1,1) shape(4,6) ranks(0:4)"),
    ],
)
def test_first_matching_glob_decides_the_layout(name: str, layout: str) -> None:
    rules = Rules(VALUES["layouts"], ranks=range(4))
    assert rules.layout(name, (4, 6)) == rv.Layout.parse(layout)


def test_toml_and_json_give_equal_rules(tmp_path: Path) -> None:
    (tmp_path / "rules.toml").write_text(TOML)
    (tmp_path / "rules.json").write_text(json.dumps(VALUES))
    expected = Rules(VALUES["layouts"], VALUES["rename"], range(4))
    assert Rules.load(tmp_path / "rules.toml") == Rules.load(tmp_path / "rules.json") == expected


@given(
    st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=3),
    st.lists(st.integers(0, 9), min_size=1, max_size=5),
)
def test_rules_survive_a_round_trip_of_their_text(
    layouts: dict[str, str], ranks: list[int]
) -> None:
    rename = {re.escape(key): key.replace("\\", "") for key in layouts}
    rules = Rules(layouts, rename, ranks, [Transpose("b", (1, 0)), Split("*", ("a*", "b*"))])
    assert Rules.parse(str(rules)) == rules
    assert [step.kind for step in rules.steps] == ["split", "transpose"]


@pytest.mark.parametrize("rules", [{"layouts": {"layers.9.*": "x"}}, {"rename": {"^modul": ""}}])
def test_patterns_that_match_nothing_are_rejected(rules: dict[str, dict[str, str]]) -> None:
    names = [f"model.{i}" for i in range(9)]
    message = r"has the pattern '.*', which no .*; the 9 tensors have names such as 'model.0', 'mod"
    with pytest.raises(rv.LayoutError, match=message):
        Rules(**rules).check_used(Rules(**rules).names(names).values())


def test_renames_are_applied_one_after_another() -> None:
    rules = Rules(rename={r"^model\.": "", r"^layers\.(\d+)": r"h.\1", "h": "H"})
    assert rules.name("model.layers.12.up") == "H.12.up"


@pytest.mark.parametrize(
    "name, text, message",
    [
        ("r.toml", "ranks = 4", "'ranks' is 4; expected ranks = '0:4'"),
        ("r.toml", "layouts = 4", "'layouts' is 4; expected"),
        ("r.toml", "[layouts]\na = 4", "'layouts' is .*; expected"),
        (
            "r.toml",
            "layout = 4",
            r"expected ranks, layouts, rename, split, .*, stack, got \['layout'\]",
        ),
        ("r.toml", "ranks = '0:'", "cannot parse ranks '0:'"),
        ("r.toml", "ranks = '3:3'", "rules need at least one rank"),
        ("r.toml", "[rename]\n'(' = 'a'", r"cannot rename '\(' to 'a'"),
        ("r.toml", "[rename]\n'a' = '\\2'", "cannot rename 'a'"),
        ("r.toml", "ranks = ", "r.toml has no rules"),
        ("r.json", "[" * 100_000, "r.json has no rules"),
        ("r.json", "[]", "expected ranks, layouts, rename"),
    ],
)
def test_invalid_rule_files_are_rejected(
    name: str, text: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(rv.LayoutError, match=message):
        Rules.load(tmp_path / name)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("pattern", ["(a+)+$", "(a|a)*$", "(.*.*.*.*.*.*.*.*)*c$"])
def test_rename_pattern_with_catastrophic_backtracking_is_rejected(
    pattern: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rvdcomm.checkpoint.rules.RENAME_SECS", 0.5)
    message = r"renaming 2 tensors by .* took longer than 0\.5 s; use a pattern without nested"
    with pytest.raises(rv.LayoutError, match=message):
        Rules(rename={pattern: ""}).names(["w", "a" * 64 + "b"])


@pytest.mark.timeout(60)
def test_glob_matching_takes_bounded_time() -> None:
    rules = Rules({"*a*a*a*a*a*a*a*a*a*a*a*a*b": "R(1)V(1)D(1)"})
    assert rules.pattern("a" * 50_000) is None


def test_renames_to_very_long_names_are_rejected() -> None:
    rename = {f"(?#{i})": "x" for i in range(20)}  # Each doubles the name.
    with pytest.raises(rv.LayoutError, match="gives a name of more than 65536 characters"):
        Rules(rename=rename).names(["w" * 100])


def test_renames_match_newlines_surrogates_and_nul() -> None:
    names = ["ä.\n\u2028.weight", "\ud800", "\0"]
    rules = Rules(rename={"ä": "a\n", "\0": "nul"})
    assert list(rules.names(names).values()) == ["a\n.\n\u2028.weight", "\ud800", "nul"]
