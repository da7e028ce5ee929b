"""An interrupted reshard resumes, and its result equals that of an uninterrupted run."""

from __future__ import annotations

import json
import multiprocessing as mp
import os
import random
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

import rvdcomm as rv
from rvdcomm.checkpoint import Rules, open_checkpoint, reshard
from rvdcomm.checkpoint.files import TEMPORARY_SUFFIX
from rvdcomm.checkpoint.forms import FORMS
from rvdcomm.checkpoint.journal import FILE_NAME, Journal
from tests.checkpoint.crash import changes_until
from tests.checkpoint.models import RULES, are_equal, files_of, load_sharded, make, model

OPTIONS: dict[str, Any] = {"max_file_bytes": 150}
"""Options with files so small that a run has several batches."""

JOIN_SECS = 60.0


def rules_of(to: str) -> Rules | None:
    return None if to == "whole" else RULES


def do(src: Path, dst: Path, to: str = "sharded", **options: Any) -> Any:
    return reshard(src, dst, rules_of(to), to=to, **{**OPTIONS, **options})


@pytest.fixture(scope="module")
def src(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make("sharded", tmp_path_factory.mktemp("src"))


@pytest.fixture(scope="module")
def whole_run(src: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, bytes]]:
    """For each form, the files of an uninterrupted run."""
    root = tmp_path_factory.mktemp("whole")
    for to in FORMS:
        do(src, root / to, to)
    return {to: files_of(root / to) for to in FORMS}


def num_changes(src: Path, dst: Path, to: str) -> int:
    return changes_until(None, lambda: do(src, dst, to))


def run_to_its_death(src: Path, dst: Path, to: str, point: int) -> None:
    """The target of a process that kills itself."""
    torch.set_num_threads(1)
    changes_until(point, lambda: do(src, dst, to), lambda: os.kill(os.getpid(), signal.SIGKILL))


# --- interrupted runs ---------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize("seed", range(4))
def test_killed_run_resumes_with_the_same_result(
    seed: int, src: Path, whole_run: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    to = list(FORMS)[seed % len(FORMS)]
    point = random.Random(seed).randint(1, num_changes(src, tmp_path / "count", to))
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["torch", "rvdcomm.checkpoint"])
    dst = tmp_path / "dst"
    process = context.Process(target=run_to_its_death, args=(src, dst, to, point))
    process.start()
    process.join(JOIN_SECS)
    assert process.exitcode == -signal.SIGKILL
    do(src, dst, to, verify=True)
    assert files_of(dst) == whole_run[to]


@pytest.mark.parametrize("to", FORMS)
def test_run_interrupted_at_any_disk_change_resumes_with_the_same_result(
    to: str, src: Path, whole_run: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    # Killing processes takes time. Here a run ends at every change in turn, in this process and in
    # one folder.
    last = num_changes(src, tmp_path / "count", to)
    dst, point, made = tmp_path / "dst", 0, 0
    while made == point:
        point += 7 if to == "dcp" else 1  # An archive is written by many small calls.
        made = changes_until(point, lambda: do(src, dst, to))
        # A reader accepts the folder as a checkpoint only once it is complete.
        if dst.exists() and files_of(dst) != whole_run[to]:
            with pytest.raises(rv.CheckpointError, match=r"has not finished|holds no check"):
                open_checkpoint(dst)
    assert 10 < point <= last + 7
    assert files_of(dst) == whole_run[to]


def test_resumed_run_keeps_complete_files(src: Path, tmp_path: Path) -> None:
    total = num_changes(src, tmp_path / "count", "sharded")
    changes_until(2 * total // 3, lambda: do(src, tmp_path / "dst"))
    kept = {path: path.stat().st_ino for path in (tmp_path / "dst").glob("*.safetensors")}
    report = do(src, tmp_path / "dst")
    assert 0 < report.num_files_kept <= len(kept)
    assert sum(report.read_bytes.values()) < report.plan.read_bytes
    again = do(src, tmp_path / "dst")
    assert (again.num_files_kept, again.read_bytes) == (report.plan.num_files, {})


def test_resumed_run_replaces_a_damaged_file(
    src: Path, whole_run: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    total = num_changes(src, tmp_path / "count", "sharded")
    changes_until(total - 12, lambda: do(src, tmp_path / "dst"))
    damaged = sorted((tmp_path / "dst").glob("*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    do(src, tmp_path / "dst")
    assert files_of(tmp_path / "dst") == whole_run["sharded"]


def test_verify_detects_a_result_file_that_was_damaged_later(src: Path, tmp_path: Path) -> None:
    do(src, tmp_path / "dst")
    damaged = sorted((tmp_path / "dst").glob("*.safetensors"))[0]
    data = bytearray(damaged.read_bytes())
    data[-1] ^= 1
    damaged.write_bytes(data)
    assert do(src, tmp_path / "dst").num_files_kept > 0  # Sizes alone are compared.
    with pytest.raises(rv.CheckpointError, match=rf"{damaged.name} is damaged in bytes \d+ to \d+"):
        do(src, tmp_path / "dst", verify=True)
    damaged.unlink()
    do(src, tmp_path / "dst", verify=True)
    assert are_equal(load_sharded(tmp_path / "dst", model()), model())


# --- different requests -------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, message",
    [
        ({"dtype": "float32"}, "dtypes was .* and is now"),
        ({"to": "dcp"}, "to was 'sharded' and is now 'dcp'"),
        ({"rules": Rules({"ids": "R(1)V(1)D(4)"}, ranks=range(4))}, "its layouts or names differ"),
        ({"rules": Rules(ranks=range(3))}, "ranks was .* and is now"),
        ({"max_file_bytes": 10_000}, "its size of files or windows differ"),
    ],
)
def test_different_request_for_the_same_destination_is_rejected(
    options: dict[str, Any], message: str, src: Path, tmp_path: Path
) -> None:
    first = {"rules": RULES, **OPTIONS}
    reshard(src, tmp_path / "dst", **first)
    before = files_of(tmp_path / "dst")
    with pytest.raises(rv.CheckpointError, match=message):
        reshard(src, tmp_path / "dst", **{**first, **options})
    assert files_of(tmp_path / "dst") == before


def test_changed_source_is_rejected_as_a_different_request(tmp_path: Path) -> None:
    tensors = model()
    src = make("whole", tmp_path, tensors)
    do(src, tmp_path / "dst")
    os.utime(src / "model.safetensors", (1, 1))
    with pytest.raises(rv.CheckpointError, match="its files of the source differ"):
        do(src, tmp_path / "dst")


def test_memory_limit_may_differ_when_a_run_resumes(
    src: Path, whole_run: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    changes_until(60, lambda: do(src, tmp_path / "dst", memory_limit=1 << 20))
    do(src, tmp_path / "dst", memory_limit=1 << 16)
    assert files_of(tmp_path / "dst") == whole_run["sharded"]


def test_concurrent_run_into_the_same_folder_is_rejected(src: Path, tmp_path: Path) -> None:
    reshard(src, tmp_path / "dst", RULES, **OPTIONS)
    request = json.loads((tmp_path / "dst" / FILE_NAME).read_text().splitlines()[0])
    log = Journal(tmp_path / "dst", request)
    with pytest.raises(rv.CheckpointError, match="another process is resharding into"):
        do(src, tmp_path / "dst")
    log.close()
    do(src, tmp_path / "dst")


# --- full disks ---------------------------------------------------------------------------------


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    disk = tmp_path / "disk"
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small disk")
    try:
        yield disk
    finally:
        subprocess.run(["umount", str(disk)], check=True, timeout=30)


@pytest.mark.parametrize("to", FORMS)
def test_full_disk_raises_checkpoint_error_and_a_rerun_succeeds(
    to: str, small_disk: Path, tmp_path: Path
) -> None:
    tensors = {f"w{i}": torch.arange(10_000) + i for i in range(6)}  # 80 kB each
    src = make("whole", tmp_path, tensors)
    options: dict[str, Any] = {"to": to, "max_file_bytes": 100_000}
    with pytest.raises(
        rv.CheckpointError,
        match=r"No space left on device: .*; make room \(.* free\) and run the same",
    ):
        reshard(src, small_disk / "dst", **options)
    # Incomplete files were removed, and complete files were kept.
    kept = [name for name in files_of(small_disk / "dst") if name != FILE_NAME]
    assert len(kept) == 3
    assert not any(name.endswith(TEMPORARY_SUFFIX) for name in kept)
    with pytest.raises(rv.CheckpointError, match="No space left on device"):
        reshard(src, small_disk / "dst", **options)
    larger = ["mount", "-o", "remount,size=2m", str(small_disk)]
    subprocess.run(larger, check=True, timeout=30)
    report = reshard(src, small_disk / "dst", **options, verify=True)
    assert report.num_files_kept == 3
    reshard(src, tmp_path / "dst", **options)
    assert files_of(small_disk / "dst") == files_of(tmp_path / "dst")


def test_journal_line_that_does_not_fit_on_the_disk_is_not_half_written(
    small_disk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src = make("whole", tmp_path, {"w": torch.arange(10)})
    record = Journal._append

    def on_a_full_disk(log: Journal, value: Any) -> None:
        if "files" in value:
            with (small_disk / "filler").open("wb", buffering=0) as file, suppress(OSError):
                while file.write(b"x" * 4096):
                    pass
        record(log, value)

    monkeypatch.setattr(Journal, "_append", on_a_full_disk)
    # The first line leaves a few bytes of its page, so that some of the second can be written.
    request = {"x": "y" * 4050}
    monkeypatch.setattr("rvdcomm.checkpoint.engine._request", lambda plan: request)
    with pytest.raises(rv.CheckpointError, match="No space left"):
        reshard(src, small_disk / "dst")
    written = (small_disk / "dst" / FILE_NAME).read_text()
    assert (json.loads(written), len(written)) == (request, 4059)
    (small_disk / "filler").unlink()
    monkeypatch.setattr(Journal, "_append", record)
    reshard(src, small_disk / "dst", verify=True)
