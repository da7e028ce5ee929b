"""The command of the placement benchmark: its table, its picture and the published speed-ups."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.placement import command as placement
from bench.placement.shapes import Machine, rnnlm


@pytest.mark.parametrize(
    "baseline, secs, published",
    [(1.57, 1.57, 0.0), (4.99, 4.04, 0.235), (4.73, 3.92, 0.206), (4.60, 3.85, 0.190)],
)
def test_speed_up_equals_the_published_values(
    baseline: float, secs: float, published: float
) -> None:
    # The table's times have two decimals.
    assert placement.speed_up(baseline, secs) == pytest.approx(published, abs=0.006)


def test_the_command_writes_its_results_and_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {name: lambda: rnnlm(Machine(), steps=2, runs=1) for name in ("a, 2", "b, 2")}
    monkeypatch.setattr(placement, "CASES", small)
    out, image = tmp_path / "out.json", tmp_path / "img" / "curve.png"
    words = ["--out", str(out), "--image", str(image), "--updates", "3", "--seeds", "2"]
    assert placement.main(words) == 0
    found = json.loads(out.read_text())["cases"]["a, 2"]
    assert found["policy_samples"] == 48
    assert min(row["secs"] for row in found["planners"].values()) == pytest.approx(
        found["planners"]["best of all"]["secs"]
    )
    assert image.read_bytes().startswith(b"\x89PNG")
    assert "| a, 2 | 8 | 48 |" in capsys.readouterr().out
