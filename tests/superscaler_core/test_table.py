"""Tables: rows of the core come first; a package brings rows, and spoils at most its own."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core import table
from superscaler_core.errors import PluginError
from superscaler_core.models import MODELS
from superscaler_core.planners import PLANNERS, PlannerRow
from superscaler_core.plans import PLANS
from superscaler_core.table import Table

GROUP = "superscaler_core.plans"
TABLES: Mapping[str, Table[object]] = {
    "plans": PLANS,
    "schedules": ss.SCHEDULES,
    "planners": PLANNERS,
    "models": MODELS,
}


def brought(monkeypatch: pytest.MonkeyPatch, *rows: tuple[str, str]) -> Table[object]:
    """A table with one row of its own, and the given entry points."""
    points = EntryPoints(EntryPoint(name, value, GROUP) for name, value in rows)
    monkeypatch.setattr(table, "entry_points", lambda group: points.select(group=group))
    return Table("plans", {"own": 1})


def test_rows_of_other_packages_follow_own_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    found = brought(monkeypatch, ("pi", "math:pi"), ("join", "os:path.join"))
    assert [*found] == ["own", "pi", "join"]
    assert len(found) == 3
    assert "pi" in found
    assert found["own"] == 1
    assert str(found["pi"]).startswith("3.14")


def test_unknown_name_raises_key_error(monkeypatch: pytest.MonkeyPatch) -> None:
    found = brought(monkeypatch)
    with pytest.raises(KeyError, match="nobodys"):
        found["nobodys"]
    assert found.get("nobodys") is None


@pytest.mark.parametrize("value", ["no_such_module:x", "math:no_such_name"])
def test_package_that_cannot_be_imported_spoils_its_own_name_only(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = brought(monkeypatch, ("bad", value), ("pi", "math:pi"))
    assert {*found} == {"own", "bad", "pi"}
    with pytest.raises(PluginError, match=f"'bad' of plans, .* {value}, cannot be imported"):
        found["bad"]
    assert found["pi"]


@pytest.mark.parametrize(
    "rows", [[("own", "math:pi")], [("pi", "math:pi"), ("pi", "math:tau")]], ids=str
)
def test_two_rows_of_one_name_are_refused(
    rows: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = brought(monkeypatch, *rows)
    with pytest.raises(PluginError, match=r"is brought by .* and by .*uninstall"):
        found[rows[0][0]]


def test_a_package_that_is_found_twice_brings_its_row_once(monkeypatch: pytest.MonkeyPatch) -> None:
    assert brought(monkeypatch, ("pi", "math:pi"), ("pi", "math:pi"))["pi"]


@pytest.mark.parametrize("kind", TABLES)
def test_every_row_of_pyproject_is_found_and_is_callable_or_a_value(kind: str) -> None:
    text = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    points = tomllib.loads(text)["project"]["entry-points"][f"superscaler_core.{kind}"]
    assert points.keys() <= TABLES[kind].keys()
    for name in points:
        row = TABLES[kind][name]
        assert isinstance(row, PlannerRow) if kind == "planners" else row is not None


def test_earlier_name_of_pipemare_warns_and_is_the_same_class() -> None:
    from superscaler_core.published.asynchronous import PipeMare

    with pytest.warns(DeprecationWarning, match=r"import it from superscaler_core.published"):
        assert ss.PipeMare is PipeMare
