"""Laws of the benchmark of stage planners: its problems, its rows and its tables."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import stage_planners
from bench.cells.workload import Workload
from superscaler_core.published.stages import STAGE_PLANNERS, StageCut, alpa

TINY = Workload(
    "gpt",
    {"layers": 4, "width": 64, "heads": 4, "sequence": 16, "vocabulary": 64, "fused": False},
    "float16",
    8,
)


def test_alpa_cuts_all_layers_of_a_small_scale_problem() -> None:
    problem = stage_planners.scale_problem(80e9, num_layers=6, num_devices=8)
    assert sum(alpa(problem).sizes) == 6


def test_every_planner_has_a_row_with_a_cut_of_all_layers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(stage_planners.MODELS, "gpt39b", (TINY, 4))
    monkeypatch.setattr(stage_planners, "SAMPLES", (4,))
    monkeypatch.setattr(stage_planners, "side_by_side", lambda do, names, *rest: [*map(do, names)])
    out = tmp_path / "result.json"
    assert stage_planners.main(["--models", "gpt39b", "--no-scale", "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    rows = json.loads(out.read_text())["models"]["gpt39b"]["planners"]
    assert [*rows] == [*STAGE_PLANNERS]
    for planner, row in rows.items():
        assert sum(StageCut.parse(row["cut"]).sizes) == 4
        assert row["simulated_secs"] == pytest.approx(row["predicted_secs"], rel=0.05)
        assert f"| {planner} | " in printed
    assert printed.count("●") >= 1
