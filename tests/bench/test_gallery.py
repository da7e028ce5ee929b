"""Laws of the gallery: its page is what its table says, and its commands can be typed."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from bench.gallery import FOLDER, GALLERY, PAGE, Shown, page
from superscaler_core import cli
from superscaler_core.plans import PLANS

pytestmark = pytest.mark.every
ROOT = Path(__file__).parents[2]
EVERY = [each for _, plans in GALLERY for each in plans]


def test_the_page_is_what_the_table_says() -> None:
    assert (ROOT / PAGE).read_text() == page(), "run python -m bench.gallery"


def test_every_picture_is_there_and_no_other() -> None:
    assert {path.stem for path in (ROOT / FOLDER).iterdir()} == {each.name for each in EVERY}


@pytest.mark.parametrize("shown", EVERY, ids=lambda each: each.name)
def test_a_picture_is_of_a_shipped_plan(shown: Shown) -> None:
    assert shlex.split(shown.words)[1].partition(":")[0] in PLANS


def test_a_command_draws_its_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = EVERY[0]
    assert cli.main(shlex.split(shown.command)[1:]) == 0
    assert (tmp_path / f"{shown.name}.png").exists()
