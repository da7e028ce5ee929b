"""A file is replaced as a whole or not at all."""

from __future__ import annotations

import os
from itertools import count
from pathlib import Path

import pytest

from rvdcomm import whole_file
from rvdcomm.whole_file import replacing, write_whole
from tests.injected import DONE, FAILED, in_child


@pytest.mark.parametrize("kill", [True, False])
def test_file_is_old_or_new_wherever_a_write_stops(tmp_path: Path, kill: bool) -> None:
    path = tmp_path / "plan.txt"
    seen = []
    for number in count():
        path.write_text("old")
        code = in_child(lambda: write_whole(path, "new"), tmp_path, number, kill=kill)
        seen.append(path.read_text())
        if code == FAILED:
            assert os.listdir(tmp_path) == ["plan.txt"], "a failed write leaves nothing behind"
        if code == DONE:
            break
    assert set(seen[:-1]) <= {"old", "new"}
    assert (seen[0], seen[-1]) == ("old", "new")


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_failed_call_leaves_the_file_and_names_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: object) -> None:
        raise OSError(28, "No space left on device")

    path = tmp_path / "plan.txt"
    path.write_text("old")
    monkeypatch.setattr(whole_file.os, name, full)
    with pytest.raises(OSError, match=r"No space left on device: '.*plan\.txt'"):
        write_whole(path, b"new")
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["plan.txt"])


def fail_in_the_middle(path: Path) -> None:
    with replacing(path) as new:
        assert new.suffix == path.suffix, "libraries choose a format by it"
        new.write_text("half")
        raise ValueError("no figure")


def test_error_of_the_block_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "figure.png"
    path.write_text("old")
    with pytest.raises(ValueError, match="no figure"):
        fail_in_the_middle(path)
    assert (path.read_text(), os.listdir(tmp_path)) == ("old", ["figure.png"])


@pytest.mark.parametrize("name", ["a" * 255, "ä" * 127, "a." + "b" * 253])
def test_longest_names_are_written(name: str, tmp_path: Path) -> None:
    write_whole(tmp_path / name, "text")
    assert (tmp_path / name).read_text() == "text"
