"""``superscaler search``: its output, its files and its errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import superscaler_core as ss
from superscaler_core.cli import search as command
from superscaler_core.cli.main import main

MLP = ("search", "mlp", "--batch", "8", "--devices", "2", "--microbatch", "4,8", "--processes", "1")


def test_printed_simulate_command_gives_the_step_time_of_the_search(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The plan file and the printed command give the step time that the search has printed."""
    plan, picture = str(tmp_path / "best.plan"), tmp_path / "best.png"
    page, again = tmp_path / "best.html", tmp_path / "again.html"
    words = ["--out", plan, "--picture", str(picture), "--html", str(page)]
    assert main([*MLP, "--max-tried", "6", *words]) == 0
    said = capsys.readouterr().out
    assert picture.stat().st_size > 5000
    assert main(["explain", "mlp", plan, "--devices", "2", "--html", str(again)]) == 0
    capsys.readouterr()
    first, second = (_candidates(path) for path in (page, again))
    assert first == second
    assert sum(row["chosen"] for row in first) == 1
    assert 1 < len(first) <= 6
    assert ss.Decisions.load(plan).devices == (0, 1)
    (step,) = re.findall(r"step +(\S+ \S+),", said)
    (words,) = re.findall(r"^ +superscaler (simulate .*)$", said, re.MULTILINE)
    assert main([*words.split(), "--summary"]) == 0
    assert f": {step} a step" in capsys.readouterr().out


@pytest.mark.dist
def test_found_plan_trains_under_torchrun_as_on_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = str(tmp_path / "best.plan")
    assert main([*MLP, "--dtype", "float64", "--max-tried", "3", "--out", plan]) == 0
    (samples,) = re.findall(r"--microbatch (\d+)", capsys.readouterr().out)
    command = ["run", "mlp", plan, "--check", "--dtype", "float64", "--microbatch", samples]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, "--standalone", "-m", "superscaler_core", *command],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("same")


def test_planner_option_selects_the_planner(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*MLP, "--planner", "galvatron"]) == 0
    assert "chosen   galvatron samples=" in capsys.readouterr().out


def test_explain_option_prints_a_table_with_one_chosen_split(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*MLP, "--max-tried", "3", "--explain", "layers.0:linear"]) == 0
    _, _, table = capsys.readouterr().out.partition("\nlayers.0:linear is decided with ")
    assert len(re.findall(r"^\*  \S", table, re.MULTILINE)) == 1


def test_interrupted_search_reports_its_partial_result(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(bar: object, num_tried: int, *_: object) -> None:
        if num_tried == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(command._Bar, "show", show)
    assert main([*MLP]) == 0
    assert re.search(r"3 tried, .* not evaluated", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--memory", "1KiB"], "no plan was found for 2 devices"),
        (["--planner", "best"], "invalid choice: 'best'"),
        (["--budget", "soon"], "expected a time such as 90s or 5m, got 'soon'"),
        (["--out", "best.txt"], "a file of decisions ends with '.plan'"),
        (["--set", "tp=2"], "the model mlp takes"),
        (["--microbatch", "3"], "microbatches of 3 samples for a step of 8"),
    ],
)
def test_invalid_search_request_exits_with_2_and_an_error(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*MLP, "--max-tried", "4", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(("text", "secs"), [("90", 90), ("90s", 90), ("5m", 300), ("1.5 h", 5400)])
def test_budget_text_is_parsed_to_seconds(text: str, secs: float) -> None:
    assert command.secs(text) == secs


def _candidates(page: Path) -> list[dict[str, Any]]:
    """The candidates in the document of a page."""
    (text,) = re.findall(r'id="document">(.*?)</script>', page.read_text(), re.DOTALL)
    found: list[dict[str, Any]] = json.loads(text)["candidates"]
    return found
