"""Links: files are read only below the source folder or its Hugging Face cache."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
import torch

import rvdcomm as rv
from rvdcomm.checkpoint import load_shards, open_checkpoint, reshard
from rvdcomm.checkpoint.files import TEMPORARY_SUFFIX, PartFile
from rvdcomm.checkpoint.folder import Folder
from rvdcomm.cli import main
from rvdcomm.file_name import beside
from tests.checkpoint.models import are_equal, files_of, load_whole, make, model

FILES = {
    "whole": "model.safetensors",
    "indexed": "model.safetensors.index.json",
    "sharded": "rvdcomm-manifest.json",
    "dcp": ".metadata",
    "dcp-safetensors": "shard-00001-model-00001-of-00001.safetensors",
}
DATA = {
    "whole": "model.safetensors",
    "indexed": "model-00002-of-00003.safetensors",
    "sharded": "rank-00003.safetensors",
    "dcp": "__0_0.distcp",
}


def move_out(file: Path, target: Path, link: str | Path | None = None) -> None:
    """Move a file to ``target`` and leave a link in its place."""
    target.parent.mkdir(parents=True, exist_ok=True)
    file.rename(target)
    file.symlink_to(link or target)


def refused(file: Path, target: Path) -> str:
    return (
        re.escape(f"{file} is a link that leads to {target}, outside of the folder") + ".*--follow"
    )


# --- rejected links -----------------------------------------------------------------------------


@pytest.mark.parametrize("kind, name", [*FILES.items(), *DATA.items()])
def test_links_out_of_the_source_are_followed_only_if_requested(
    kind: str, name: str, tmp_path: Path
) -> None:
    src, target = make(kind, tmp_path), tmp_path / "secrets" / "file"
    move_out(src / name, target)
    with pytest.raises(rv.CheckpointError, match=refused(src / name, target)):
        reshard(src, tmp_path / "dst", to="whole")
    assert not (tmp_path / "dst").exists() or not list((tmp_path / "dst").glob("*.safetensors"))
    shutil.rmtree(tmp_path / "dst", ignore_errors=True)
    reshard(src, tmp_path / "dst", to="whole", follow_symlinks=True)
    assert are_equal(load_whole(tmp_path / "dst", model()), model())


def test_load_shards_follows_links_out_of_the_source_only_if_requested(tmp_path: Path) -> None:
    src, target = make("whole", tmp_path), tmp_path / "secret"
    move_out(src / "model.safetensors", target)
    layouts = {"ids": rv.Layout((11,), "R(1)V(1)D(1)")}
    with pytest.raises(rv.CheckpointError, match=refused(src / "model.safetensors", target)):
        load_shards(src, layouts, 0)
    found = load_shards(src, layouts, 0, follow_symlinks=True)["ids"]
    assert torch.equal(found, model()["ids"])


def test_journal_of_the_source_that_is_a_link_is_rejected(tmp_path: Path) -> None:
    src = make("whole", tmp_path)
    (tmp_path / "journal").write_text('{"done": true}\n')
    (src / "rvdcomm-journal.jsonl").symlink_to(tmp_path / "journal")
    with pytest.raises(rv.CheckpointError, match=r"journal\.jsonl is a link that leads to"):
        open_checkpoint(src)


@pytest.mark.parametrize(
    "link, inside", [("inside", "../secrets/file"), ("inside/file", "../secrets")]
)
def test_last_target_of_a_chain_of_links_is_checked(link: str, inside: str, tmp_path: Path) -> None:
    src, target = make("whole", tmp_path), tmp_path / "secrets/file"
    move_out(src / "model.safetensors", target, link)
    (src / "inside").symlink_to(inside)
    with pytest.raises(rv.CheckpointError, match=refused(src / "model.safetensors", target)):
        open_checkpoint(src)


@pytest.mark.parametrize("link", ["model.safetensors", "loop"])
def test_loop_of_links_is_rejected(link: str, tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").symlink_to(link)
    (tmp_path / "loop").symlink_to("model.safetensors")
    with pytest.raises(rv.CheckpointError, match="is a link that leads back to itself"):
        open_checkpoint(tmp_path)


def test_error_names_a_dangling_link(tmp_path: Path) -> None:
    src = make("whole", tmp_path)
    (src / "rvdcomm-manifest.json").symlink_to("gone")
    with pytest.raises(rv.CheckpointError, match=r"rvdcomm-manifest\.json is missing"):
        open_checkpoint(src)


def test_command_line_follows_links_only_if_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    src, target = make("whole", tmp_path), tmp_path / "secret"
    move_out(src / "model.safetensors", target)
    words = ["reshard", str(src), str(tmp_path / "dst"), "--no-progress"]
    assert main(words) == 2
    assert f"model.safetensors is a link that leads to {target}" in capsys.readouterr().err
    assert main([*words, "--follow-symlinks"]) == 0


# --- followed links -----------------------------------------------------------------------------


def test_links_within_the_source_are_followed(tmp_path: Path) -> None:
    src = make("indexed", tmp_path)
    for file in list(src.glob("*.safetensors")):
        move_out(file, src / "deeper/data" / file.name, f"deeper/../deeper/data/{file.name}")
    reshard(src, tmp_path / "dst", to="whole")
    assert are_equal(load_whole(tmp_path / "dst", model()), model())


@pytest.mark.parametrize("below", ["", "text_encoder"])
def test_links_into_a_hugging_face_cache_are_followed(below: str, tmp_path: Path) -> None:
    repository = tmp_path / "hub/models--owner--name"
    snapshot = repository / "snapshots/0123abcd" / below
    shutil.copytree(make("indexed", tmp_path), snapshot)
    for i, file in enumerate(sorted(snapshot.iterdir())):
        blob = repository / f"blobs/{i:040x}"
        move_out(file, blob, os.path.relpath(blob, snapshot))
    (tmp_path / "latest").symlink_to(snapshot)
    for src in (snapshot, tmp_path / "latest"):
        assert set(open_checkpoint(src).tensors) == set(model())
    # Another repository of the cache is outside.
    other = tmp_path / "hub/models--owner--other/blobs/1"
    file = snapshot / "model-00002-of-00003.safetensors"
    move_out(file.resolve(), other)
    with pytest.raises(rv.CheckpointError, match=refused(file, other)):
        open_checkpoint(snapshot)


# --- links and files that change during a read --------------------------------------------------


@pytest.mark.parametrize("swapped", ["deeper", "deeper/file"])
def test_link_created_while_a_file_is_opened_is_not_followed(
    swapped: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    src, secrets = tmp_path / "src", tmp_path / "secrets"
    for folder in (src / "deeper", secrets):
        folder.mkdir(parents=True)
        (folder / "file").write_text(folder.name)
    (src / "name").symlink_to("deeper/file")
    folder, realpath = Folder(src), os.path.realpath

    def resolved_then_swapped(path: Path) -> str:
        found = realpath(path)
        (src / swapped).rename(src / "away")
        (src / swapped).symlink_to(secrets if swapped == "deeper" else secrets / "file")
        return found

    monkeypatch.setattr("rvdcomm.checkpoint.folder.os.path.realpath", resolved_then_swapped)
    with pytest.raises(rv.CheckpointError, match="was changed while it was opened"):
        folder.open("name")


@pytest.mark.parametrize("is_renamed", [True, False])
def test_file_that_changes_between_two_reads_is_rejected(is_renamed: bool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("before")
    folder = Folder(tmp_path)
    folder.open("file").close()
    (tmp_path / "new").write_text("after.")
    os.utime(tmp_path / "new", ns=(0, 0))
    if is_renamed:
        (tmp_path / "new").replace(tmp_path / "file")
    else:
        os.utime(tmp_path / "file", ns=(0, 0))
    with pytest.raises(rv.CheckpointError, match="file changed while the checkpoint was read"):
        folder.open("file")


def test_rejected_files_leave_no_open_descriptor(tmp_path: Path) -> None:
    (tmp_path / "folder/below").mkdir(parents=True)
    (tmp_path / "link").symlink_to("folder/below/gone/file")
    folder, before = Folder(tmp_path), len(os.listdir("/proc/self/fd"))
    for name in ("folder", "link", "gone"):
        with pytest.raises(rv.CheckpointError):
            folder.open(name)
    assert len(os.listdir("/proc/self/fd")) == before


# --- the destination ----------------------------------------------------------------------------


def test_links_in_the_destination_are_replaced_and_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "dst").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "dst/name").symlink_to(tmp_path / "mine")
    (tmp_path / "dst" / beside("name", TEMPORARY_SUFFIX)).symlink_to(tmp_path / "mine")
    part = PartFile(tmp_path / "dst", "name")
    part.append(b"new")
    part.commit()
    assert (tmp_path / "mine").read_text() == "mine"
    assert files_of(tmp_path / "dst") == {"name": b"new"}
    assert not (tmp_path / "dst/name").is_symlink()


def test_link_that_replaces_a_partial_file_is_not_written_through(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    part = PartFile(tmp_path, "name")
    part.temporary.unlink()
    part.temporary.symlink_to("mine")
    with pytest.raises(OSError, match="symbolic links"):
        part.append(b"new")
    with pytest.raises(OSError, match="symbolic links"):
        part.commit()
    assert (tmp_path / "mine").read_text() == "mine"


def test_journal_of_the_destination_that_is_a_link_is_rejected(tmp_path: Path) -> None:
    src, dst = make("whole", tmp_path), tmp_path / "dst"
    dst.mkdir()
    (tmp_path / "mine").write_text("")
    (dst / "rvdcomm-journal.jsonl").symlink_to(tmp_path / "mine")
    with pytest.raises(rv.CheckpointError, match=r"journal\.jsonl is a link; remove it"):
        reshard(src, dst)
    assert (tmp_path / "mine").read_text() == ""


def test_result_file_that_became_a_link_is_written_again(tmp_path: Path) -> None:
    src, dst = make("whole", tmp_path), tmp_path / "dst"
    reshard(src, dst)
    (file,) = dst.glob("*.safetensors")
    move_out(file, tmp_path / "elsewhere")
    assert reshard(src, dst).num_files_kept == 0
    assert not file.is_symlink()
