"""The command ``rvdcomm reshard``."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import torch

from rvdcomm.checkpoint import Rules, plan_reshard
from rvdcomm.cli import main
from tests.checkpoint.models import are_equal, files_of, load_sharded, load_whole, make, model

RULES = 'ranks = "0:2"\n[layouts]\n"*.q.weight" = "R(1)V(1)D(2,1)"\n'


@pytest.fixture
def rules(tmp_path: Path) -> str:
    (tmp_path / "rules.toml").write_text(RULES)
    return str(tmp_path / "rules.toml")


def output(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    status = main(list(map(str, words)))
    printed = capsys.readouterr()
    assert (status, printed.err) == (0, "")
    return printed.out


def test_command_reshards_and_a_second_run_keeps_all_files(
    capsys: pytest.CaptureFixture[str], rules: str, tmp_path: Path
) -> None:
    src, dst = make("whole", tmp_path), tmp_path / "dst"
    printed = output(capsys, "reshard", src, dst, "--rules", rules, "--verify")
    assert printed.startswith("8 tensors in 2 files; read ")
    assert are_equal(load_sharded(dst, model()), model())
    again = output(capsys, "reshard", src, dst, "--rules", rules)
    assert again.startswith("8 tensors in 2 files, 2 of them from before; read 0 B in")


def test_options_for_form_dtype_and_tensors_only_take_effect(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    src, dst = make("dcp", tmp_path, {"w": torch.ones(300), "n": 3}), tmp_path / "dst"  # type: ignore[dict-item]
    words = ["--to", "whole", "--dtype", "bfloat16", "--max-file-bytes", "1KB"]
    output(capsys, "reshard", src, dst, *words, "--tensors-only", "--memory-limit", "1MiB")
    assert are_equal(load_whole(dst, model()), {"w": torch.ones(300).bfloat16()})


def test_a_dry_run_prints_the_plan_and_writes_nothing(
    capsys: pytest.CaptureFixture[str], rules: str, tmp_path: Path
) -> None:
    src, dst = make("sharded", tmp_path), tmp_path / "dst"
    printed = output(capsys, "reshard", src, dst, "--rules", rules, "--dry-run")
    assert printed == f"{plan_reshard(src, Rules.load(rules))}\n"
    assert max(map(len, printed.splitlines())) <= 100
    assert not dst.exists()


@pytest.mark.parametrize(
    "words, message",
    [
        (["SRC", "SRC"], "is source and destination"),
        (["NONE", "DST"], "is no folder with a checkpoint"),
        (["SRC", "DST", "--dtype", "int3"], "dtype 'int3' is unknown"),
        (["SRC", "DST", "--rules", "NONE"], "No such file"),
        (["SRC", "DST", "--memory-limit", "1"], "memory_limit=1 is too small"),
        (["SRC", "DST", "--memory-limit", "x"], "cannot parse bytes 'x'"),
    ],
)
def test_errors_are_printed_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    make("whole", tmp_path)
    names = {"SRC": tmp_path / "whole", "DST": tmp_path / "dst", "NONE": tmp_path / "none"}
    status = main(["reshard", *(str(names.get(word, word)) for word in words)])
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, "")
    assert message in printed.err
    assert printed.err.count("\n") == 1
    assert list(files_of(tmp_path / "whole")) == ["model.safetensors"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    "stream, words, delay_secs, has_bar",
    [
        (Terminal, [], 0.0, True),
        (Terminal, [], 60.0, False),
        (Terminal, ["--no-progress"], 0.0, False),
        (io.StringIO, [], 0.0, False),
    ],
)
def test_progress_bar_is_shown_only_on_a_terminal_after_a_delay(
    stream: type[io.StringIO],
    words: list[str],
    delay_secs: float,
    has_bar: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("rvdcomm.checkpoint.engine.PROGRESS_DELAY_SECS", delay_secs)
    monkeypatch.setattr(sys, "stderr", stderr := stream())
    assert main(["reshard", str(make("whole", tmp_path)), str(tmp_path / "dst"), *words]) == 0
    assert ("100%|" in stderr.getvalue()) == has_bar
