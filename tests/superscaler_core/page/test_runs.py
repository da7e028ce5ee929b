"""Runs: a large program has a page of bounded size."""

from __future__ import annotations

from typing import Any

import pytest

from superscaler_core.page import runs
from superscaler_core.page.edge_rows import EdgeRows
from superscaler_core.page.layer_rows import LayerRows
from superscaler_core.page.runs import Runs
from tests.superscaler_core.page.pages import simulated


def value_of(name: str) -> tuple[Runs, dict[str, Any]]:
    found = simulated(name)
    made = found.compiled.materialized
    made_runs = Runs(found.timeline, LayerRows(made), EdgeRows(made, found.compiled.report()))
    return made_runs, made_runs.value


def test_equal_runs_are_stored_once() -> None:
    _, value = value_of("hybrid")
    assert len(value["insides"]) < len(value["runs"])
    assert {number for *_, number in value["runs"]} == {*range(len(value["insides"]))}


def test_runs_beyond_the_limit_are_one_act_each_and_a_note_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _, whole = value_of("hybrid")
    monkeypatch.setattr(runs, "MAX_SPANS", 20)
    made, value = value_of("hybrid")
    assert len(value["runs"]) == len(whole["runs"])
    short = [inside for inside in value["insides"] if inside["short"]]
    assert short
    assert max(len(inside["spans"]) for inside in short) <= len(made.devices)
    assert any("without their inside" in note for note in made.notes)


def test_of_many_devices_a_regular_sample_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_ROWS", 2)
    made, value = value_of("zero3")
    assert value["devices"] == [0, 2]
    assert {device for group in value["groups"] for device in group} == {0, 2}
    assert any("Of 4 devices every 2th" in note for note in made.notes)
