"""Laws of strong scaling: all cells train one model with one batch; only communication differs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from bench.studies import strong_scaling
from bench.studies.strong_scaling import NUM_GPUS, P2P, RVD, cells, lines, speeds


def row(num: int, method: str, secs: float) -> dict[str, Any]:
    return {
        "cell": f"strong-{num}-{method}", "gpus": num, "planner": "Megatron", "secs": secs,
        "samples_per_sec": 512 / secs, "plan": "some",
        "pulled_secs": {"intra": 4 * secs, "inter": 2 * secs, "both": 8 * secs},
    }  # fmt: skip


ROWS = [
    row(4, RVD, 64.0),
    row(8, RVD, 32.0),
    row(4, P2P, 128.0),
    {"cell": "strong-8-p2p", "gpus": 8},
]


def test_all_cells_share_one_workload() -> None:
    assert len(cells()) == 2 * len(NUM_GPUS)
    assert len({id(cell.workload) for cell in cells().values()}) == 1
    assert {cell.communication for cell in cells().values()} == {RVD, P2P}


def test_speeds_are_computed_from_the_rows() -> None:
    assert speeds(ROWS) == {
        RVD: {4: 8.0, 8: 16.0},
        "inter": {4: 4.0, 8: 8.0},
        "intra": {4: 2.0, 8: 4.0},
        "both": {4: 1.0, 8: 2.0},
        P2P: {4: 4.0},
    }


def test_lines_show_the_speed_up_over_the_fewest_gpus() -> None:
    head, four, eight = lines(ROWS)
    assert len(head) == len(four) == len(eight)
    assert four[:2] == ["4", "8 (1.0 x)"]
    assert eight[:3] == ["8", "16 (2.0 x)", "8 (1.0 x)"]
    assert eight[-2:] == ["-", "some"]


def test_option_kept_writes_no_result_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{**each, "commit": "1234567"} for each in ROWS]
    monkeypatch.setattr(strong_scaling, "run", lambda *_: rows)
    assert strong_scaling.main(["--kept", "--out", str(tmp_path / "result.json")]) == 0
    assert not (tmp_path / "result.json").exists()
