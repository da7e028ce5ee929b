"""Candidates file: what is saved beside a plan is loaded with this plan, and no other."""

from __future__ import annotations

from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.page import CandidateRow, load_candidates, save_candidates

ROWS = [
    CandidateRow("dp=2", 0.25, 7, is_chosen=True),
    CandidateRow("tp=2", 0.5, 5, is_estimate=True),
    CandidateRow("pp=2", None, 9, "more memory than a device has"),
]


@pytest.fixture
def plan(tmp_path: Path) -> Path:
    (tmp_path / "best.plan").write_text("a plan")
    return tmp_path / "best.plan"


def test_load_returns_what_was_saved(plan: Path) -> None:
    assert save_candidates(ROWS, plan).name == "best.candidates.json"
    assert load_candidates(plan) == ROWS


def test_a_plan_without_a_search_has_none(plan: Path) -> None:
    assert load_candidates(plan) == ()
    assert load_candidates("data_parallel") == ()


def test_candidates_of_another_plan_of_this_name_are_left_out(plan: Path) -> None:
    save_candidates(ROWS, plan)
    plan.write_text("another plan")
    assert load_candidates(plan) == ()


@pytest.mark.parametrize("text", ["", "[]", '{"plan": 1}', '{"candidates": []}'])
def test_error_for_another_file_says_how_to_get_one(plan: Path, text: str) -> None:
    save_candidates(ROWS, plan).write_text(text)
    if text == '{"plan": 1}':
        assert load_candidates(plan) == ()
        return
    with pytest.raises(ss.PlanError, match="remove the file, or search again"):
        load_candidates(plan)
