"""Laws of the gallery: its page is generated from its table, and its commands draw pictures."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bench.gallery import FOLDER, GALLERY, PAGE, page
from superscaler_core import cli
from superscaler_core.plans import PLANS

ROOT = Path(__file__).parents[2]
EVERY = [each for _, plans in GALLERY for each in plans]


def test_gallery_page_is_up_to_date_with_its_table() -> None:
    assert (ROOT / PAGE).read_text() == page(), "run python -m bench.gallery"


def test_picture_folder_holds_exactly_the_pictures_of_the_table() -> None:
    assert {path.stem for path in (ROOT / FOLDER).iterdir()} == {each.name for each in EVERY}


def test_plan_of_every_picture_is_shipped() -> None:
    plans = {each.name: shlex.split(each.words)[1].partition(":")[0] for each in EVERY}
    assert [(name, plan) for name, plan in plans.items() if plan not in PLANS] == []


def test_command_of_the_first_picture_draws_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shown = EVERY[0]
    assert cli.main(shlex.split(shown.command)[1:]) == 0
    assert (tmp_path / f"{shown.name}.png").exists()
