"""The benchmark of steps on one device: it times both programs, and stops if losses differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import one_device


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_device, "SEQUENCE", 8)
    monkeypatch.setattr(one_device, "VOCABULARY", 16)


def test_a_run_times_both_programs_for_every_dtype(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "found.json"
    given = ["--widths", "16", "--layers", "1", "--batch", "2", "--steps", "3", "--out", str(out)]
    assert one_device.main(given) == 0
    rows = json.loads(out.read_text())["rows"]
    assert [row["dtype"] for row in rows] == ["float32", "bfloat16"]
    for row in rows:
        for name, secs in row["samples"].items():
            assert len(secs) == 3
            assert min(secs) <= row[f"{name}_secs"] <= max(secs)
    assert "torch ms" in capsys.readouterr().out


def test_losses_that_differ_stop_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_device, "DTYPES", {"float32": -1.0})
    with pytest.raises(SystemExit, match="width 16, float32: the losses differ"):
        one_device.row_of(16, 1, 2, "float32", 1)
