"""Result files: the figures, their origin, and a picture where there is matplotlib."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.result import environment, write

RESULTS = sorted((Path(__file__).parents[2] / "bench" / "results").glob("*.json"))


def test_a_result_has_the_command_as_one_can_type_it() -> None:
    found = environment("run", ["--sizes", "64 KiB", "--n", "4"])
    assert found["command"] == "python -m bench.run --sizes '64 KiB' --n 4"
    assert environment("run", [])["command"] == "python -m bench.run"
    assert found["commit"]


def test_the_picture_is_beside_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "found.json"
    write({"rows": [1, 2]}, out, lambda path: path.write_text("a picture"))
    assert json.loads(out.read_text()) == {"rows": [1, 2]}
    assert out.with_suffix(".png").read_text() == "a picture"
    assert capsys.readouterr().out == f"wrote {out} and {out.with_suffix('.png')}\n"


def test_the_file_is_written_without_matplotlib(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def draw(path: Path) -> None:
        raise ImportError("No module named 'matplotlib'")

    write({"rows": []}, tmp_path / "found.json", draw)
    assert json.loads((tmp_path / "found.json").read_text()) == {"rows": []}
    assert "install the extra `plot`" in capsys.readouterr().out


def test_results_in_the_repository_are_of_clean_commits() -> None:
    commits = {path: json.loads(path.read_text())["commit"] for path in RESULTS}
    assert [path for path, commit in commits.items() if "dirty" in commit] == []
