"""``superscaler schedule``: grids, texts and pictures of schedules."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path

import pytest

from superscaler_core.cli.main import main
from superscaler_core.schedules import SCHEDULES, Schedule, grid, interleaved, timeline


def printed(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["schedule", *words]) == 0
    return capsys.readouterr().out


def test_grid_is_printed_with_three_bubble_ratios(capsys: pytest.CaptureFixture[str]) -> None:
    """A worker has two interleaved stages. Each takes half of its time."""
    half = {"F": Fraction(1, 2), "B": Fraction(1)}
    expected = grid(timeline(interleaved(2, 4, 2), half))
    bubbles = "bubble: 1/9 of the makespan, 1/8 of the busy time, 1/9 of the longest span\n"
    found = printed(capsys, "interleaved", "--workers", "2", "--microbatches", "4")
    assert found == f"{expected}\n{bubbles}"


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("interlaced", "nf1b")])
def test_printed_schedule_text_round_trips_through_parse(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = printed(capsys, name, "--text", "--halves", "--apart", "--times", "F=1,I=1,W=1,F&I=2")
    assert str(Schedule.parse(text)) == text.strip()


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_schedule_pictures_are_written_as_png_and_svg(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / f"grids{suffix}"
    printed(capsys, "dualpipe", "zero-bubble-v", "--times", "F=1,B=2,F&B=2", "--picture", str(path))
    assert path.stat().st_size > 5000


@pytest.mark.parametrize(
    "words, message",
    [
        (["dualpipe", "--workers", "3"], "dualpipe of 3 workers and 8 microbatches"),
        (["1f1b", "--times", "F"], "expected times such as F=1,I=1,W=1, got 'F'"),
        (["1f1b", "--times", "Q=1"],
         "'Q' has no time; times are of B, F, I, R, W, f, and of pairs"),
        (["1f1b", "--times", "F=0"], "duration of F at stage 0 is an int or a Fraction above 0"),
        (["2f2b"], "invalid choice: '2f2b'"),
        (["1f1b", "--picture", "grid.txt"], "cannot draw to 'grid.txt'"),
    ],
)  # fmt: skip
def test_invalid_schedule_request_exits_with_2_and_an_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["schedule", *words]) == 2
    assert message in capsys.readouterr().err
