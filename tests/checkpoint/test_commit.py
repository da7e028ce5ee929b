"""Commits: a folder that does not hold one complete save is rejected."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import combinations, repeat
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import rvdcomm as rv
from rvdcomm.checkpoint import commit_shards, load_shards, open_checkpoint, reshard, save_shards
from rvdcomm.checkpoint.files import PartFile
from tests.checkpoint.crash import Disk, changes_until, instead_of_os
from tests.checkpoint.models import RULES, are_equal, files_of, load_whole, make, model

LAYOUTS = {
    "sum": rv.Layout((4,), "R(1)V(2)D(1)"),
    "rows": rv.Layout((5, 2), "R(1)V(1)D(2,1)"),
    "stage": rv.Layout((3,), "R(1)V(1)D(1)", ranks=[1]),
}
WHOLE = {
    name: rv.Layout(layout.shape, f"R(1)V(1)D({','.join('1' * len(layout.shape))})")
    for name, layout in LAYOUTS.items()
}


def values(scale: float) -> dict[str, list[float]]:
    """The values of the tensors of a save, flattened."""
    return {"sum": [3 * scale] * 4, "rows": [scale] * 10, "stage": [scale] * 3}


def save(root: Path, rank: int, scale: float, save_id: str = "") -> None:
    """Save a rank's shards; value part p of the sum is (p + 1) * scale."""
    shards = {
        name: torch.full(layout.cell(rank).box.shape, scale)
        for name, layout in LAYOUTS.items()
        if rank in layout
    }
    shards["sum"] *= rank + 1
    save_shards(root, shards, LAYOUTS, rank, save_id=save_id)


def load(root: Path) -> dict[str, list[float]]:
    return {name: t.flatten().tolist() for name, t in load_shards(root, WHOLE, 0).items()}


def load_partially(root: Path) -> list[float]:
    """Load row 1. It is only a part of rank 0's shard, so no checksum is compared."""
    row = rv.Layout((5, 2), "R(1)V(1)D(5,1)")
    return load_shards(root, {"rows": row}, 1)["rows"].flatten().tolist()


# --- folders that were never committed ----------------------------------------------------------


@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("text", ["R(1)V(2)D(1,1)", "R(1)V(1)D(2,1)", "R(2)V(1)D(1,1)"])
def test_shards_without_a_commit_are_rejected(
    ranks: tuple[int, ...], text: str, tmp_path: Path
) -> None:
    src, dst = tmp_path / "src", tmp_path / "dst"
    layouts = {"w": rv.Layout((4, 2), text)}
    for rank in ranks:
        shard = torch.ones(layouts["w"].cell(rank).box.shape)
        save_shards(src, {"w": shard}, layouts, rank)
    message = rf"src was never committed: rank-0000{ranks[0]}\.safetensors has shards of rank"
    with pytest.raises(rv.CheckpointError, match=message):
        load_shards(src, {"w": rv.Layout((4, 2), "R(1)V(1)D(1,1)")}, 0)
    with pytest.raises(rv.CheckpointError, match=message):
        reshard(src, dst)
    assert not dst.exists()


def test_uncommitted_shards_in_a_renamed_file_are_rejected(tmp_path: Path) -> None:
    save(tmp_path / "src", 0, 1.0)
    (tmp_path / "src/rank-00000.safetensors").rename(tmp_path / "src/model.safetensors")
    with pytest.raises(rv.CheckpointError, match=r"was never committed: model.safetensors has"):
        open_checkpoint(tmp_path / "src")


DESCRIPTIONS = {
    "sharded": ("rvdcomm-manifest.json", "was never committed"),
    "dcp": (".metadata", "holds no checkpoint"),
    "indexed": ("model.safetensors.index.json", "is one of 3 files, and .*index.json is missing"),
}


@pytest.mark.parametrize("kind", DESCRIPTIONS)
def test_folder_whose_metadata_file_is_cut_off_or_missing_is_rejected(
    kind: str, tmp_path: Path
) -> None:
    name, message = DESCRIPTIONS[kind]
    path = make(kind, tmp_path) / name
    for size in (path.stat().st_size // 2, 0):
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(rv.CheckpointError, match=rf"{name} (is no|describes no)"):
            open_checkpoint(path.parent)
    path.unlink()
    with pytest.raises(rv.CheckpointError, match=message):
        open_checkpoint(path.parent)


@pytest.mark.parametrize("is_copied_without", ["rvdcomm-journal.jsonl", "rvdcomm-manifest.json"])
@pytest.mark.parametrize("to", ["sharded", "whole", "dcp"])
def test_incomplete_copy_of_a_result_is_rejected_or_has_all_tensors(
    to: str, is_copied_without: str, tmp_path: Path
) -> None:
    rules = None if to == "whole" else RULES
    reshard(make("whole", tmp_path), tmp_path / "one", rules, to=to, max_file_bytes=150)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    rejected = set()
    for name in names:
        copy = tmp_path / f"without-{name}"
        shutil.copytree(tmp_path / "one", copy)
        (copy / is_copied_without).unlink(missing_ok=True)
        (copy / name).unlink(missing_ok=True)
        try:
            reshard(copy, tmp_path / "again" / name, to="whole")
        except rv.CheckpointError:
            rejected.add(name)
            continue
        assert are_equal(load_whole(tmp_path / "again" / name, model()), model()), name
    # A data file is spared only if it has nothing but replicas.
    assert any(name.endswith((".safetensors", ".distcp")) for name in rejected)


# --- two saves ----------------------------------------------------------------------------------


@pytest.mark.parametrize("read", [load, load_partially])
@pytest.mark.parametrize("rank", [0, 1])
def test_file_of_another_save_is_rejected(
    rank: int, read: Callable[[Path], object], tmp_path: Path
) -> None:
    for name, scale in (("a", 1.0), ("b", 10.0)):
        for r in range(2):
            save(tmp_path / name, r, scale)
        commit_shards(tmp_path / name, range(2))
    file = f"rank-0000{rank}.safetensors"
    shutil.copy(tmp_path / "b" / file, tmp_path / "a" / file)
    with pytest.raises(rv.CheckpointError, match=rf"{file} is not the file that .* commits: anoth"):
        read(tmp_path / "a")


def test_files_of_two_saves_without_a_manifest_are_rejected(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        src = make("whole", tmp_path / name)
        reshard(src, tmp_path / name / "dst", to="whole", max_file_bytes=150)
        (tmp_path / name / "dst/rvdcomm-manifest.json").unlink()
    file = sorted(path.name for path in (tmp_path / "b/dst").glob("model-00002-*"))[0]
    shutil.copy(tmp_path / "b/dst" / file, tmp_path / "a/dst" / file)
    with pytest.raises(rv.CheckpointError, match="were written by two different saves"):
        open_checkpoint(tmp_path / "a/dst")


def test_second_save_of_a_rank_without_save_id_is_rejected(tmp_path: Path) -> None:
    # Otherwise the shards of rank 1 could belong to the first or to the second save of rank 0.
    save(tmp_path, 0, 1.0)
    save(tmp_path, 1, 1.0)
    with pytest.raises(rv.CheckpointError, match="rank 0 saved before with save_id='' and that we"):
        save(tmp_path, 0, 10.0)
    commit_shards(tmp_path, range(2))
    assert load(tmp_path) == values(1.0)


def test_save_id_distinguishes_two_saves(tmp_path: Path) -> None:
    save(tmp_path, 0, 1.0, "first")
    save(tmp_path, 1, 1.0, "first")
    save(tmp_path, 0, 10.0, "second")
    with pytest.raises(rv.CheckpointError, match=r"2 saves, with save_id \['first', 'second'\]; s"):
        commit_shards(tmp_path, range(2))
    with pytest.raises(
        rv.CheckpointError, match=r"rank 1 has saved no shards as .* save_shards on"
    ):
        commit_shards(tmp_path, range(2), save_id="second")
    save(tmp_path, 1, 10.0, "second")
    commit_shards(tmp_path, range(2), save_id="second")
    assert load(tmp_path) == values(10.0)


@pytest.mark.parametrize("first", [*[*combinations(range(6), 3)][::4], (3, 4, 5)])
def test_of_two_jobs_in_one_folder_one_is_told_saved_and_its_data_are_there(
    first: tuple[int, ...], tmp_path: Path
) -> None:
    def job(scale: float) -> Iterator[float | None]:
        """Its calls, one a turn; last it says what was saved."""
        for rank in range(2):
            try:
                save(tmp_path, rank, scale, str(scale))
            except rv.CheckpointError:
                yield from repeat(None)
            yield None
        try:
            commit_shards(tmp_path, range(2), save_id=str(scale))
        except rv.CheckpointError:
            yield from repeat(None)
        yield scale

    jobs = job(1.0), job(10.0)
    told = [scale for turn in range(6) if (scale := next(jobs[turn not in first])) is not None]
    assert len(told) == 1
    assert load(tmp_path) == values(told[0])
    assert len(files_of(tmp_path)) == 3
    assert set(load_whole(tmp_path, {})) == set(LAYOUTS)


def test_commit_of_ranks_with_different_layouts_is_rejected(tmp_path: Path) -> None:
    save(tmp_path, 0, 1.0)
    fewer = {name: layout for name, layout in LAYOUTS.items() if name != "stage"}
    shards = {n: torch.ones(layout.cell(1).box.shape) for n, layout in fewer.items()}
    save_shards(tmp_path, shards, fewer, 1)
    with pytest.raises(rv.CheckpointError, match=r"ranks 0 and 1 .* sha256 of all layouts is"):
        commit_shards(tmp_path, range(2))


def test_commit_without_all_ranks_names_the_missing_ranks(tmp_path: Path) -> None:
    layouts = {f"w{r}": rv.Layout((3,), "R(1)V(1)D(1)", ranks=[r]) for r in range(3)}
    for rank in range(3):
        save_shards(tmp_path, {f"w{rank}": torch.ones(3)}, layouts, rank)
    with pytest.raises(rv.CheckpointError, match=r"hold ranks 0:3, and .* was not given 1,2"):
        commit_shards(tmp_path, [0])
    with pytest.raises(rv.CheckpointError, match="needs the ranks that saved, got none"):
        commit_shards(tmp_path, [])


@pytest.mark.parametrize("name", ["rvdcomm-journal.jsonl", ".metadata", "rvdcomm-manifest.json"])
def test_shards_are_not_saved_into_a_folder_with_another_checkpoint(
    name: str, tmp_path: Path
) -> None:
    (tmp_path / name).touch()
    with pytest.raises(rv.CheckpointError, match=rf"\({name}\); use a new folder"):
        save(tmp_path, 0, 1.0)
    with pytest.raises(rv.CheckpointError, match=rf"\({name}\); use a new folder"):
        commit_shards(tmp_path, [0])


# --- crashes ------------------------------------------------------------------------------------


def try_to_load(root: Path) -> dict[str, list[float]] | None:
    """The values in the folder, or None if loading raises ``CheckpointError``."""
    with suppress(rv.CheckpointError):
        return load(root)
    return None


@pytest.mark.parametrize("has_first", [False, True])
def test_save_interrupted_at_any_disk_change_is_rejected_or_complete(
    has_first: bool, tmp_path: Path
) -> None:
    def second(root: Path) -> None:
        for rank in range(2):
            save(root, rank, 10.0, "second")
        commit_shards(root, range(2), save_id="second")

    seen, point, made = [], 0, 0
    while made == point:
        point, root = point + 1, tmp_path / str(point)
        if has_first:
            for rank in range(2):
                save(root, rank, 1.0, "first")
        made = changes_until(point, lambda root=root: second(root))  # type: ignore[misc]
        seen.append(try_to_load(root) if root.exists() else None)
        if seen[-1] is None:
            # A commit of the files that the crash left gives one complete save, or an error.
            with suppress(rv.CheckpointError):
                commit_shards(root, range(2), save_id="second")
            expected = (values(10.0), None)
            assert not root.exists() or try_to_load(root) in expected
    # Nothing can be loaded before the manifest is renamed, and everything can after that.
    assert point > 25
    assert set(map(str, seen)) == {str(None), str(values(10.0))}
    first = seen.index(values(10.0))
    assert None not in seen[first:]


@pytest.mark.parametrize("step", ["save", "commit"])
def test_failing_disk_raises_a_checkpoint_error_that_names_the_file(
    step: str, tmp_path: Path
) -> None:
    def fail() -> None:
        raise OSError(errno.EIO, "Input/output error")

    def do(root: Path) -> None:
        if step == "save":
            save(root / "made/shards", 0, 1.0)
        else:
            commit_shards(root, range(2))

    def folder(name: str) -> Path:
        root = tmp_path / name
        for rank in range(2 if step == "commit" else 0):
            save(root, rank, 1.0)
        return root

    counted = folder("count")
    total = changes_until(None, lambda: do(counted))
    for point in range(1, total + 1):
        root = folder(str(point))
        what = rf"(saving shards of rank 0 into|committing) {root}.* stopped: "
        message = rf"{what}.*Input/output error: '{tmp_path}.*; remove the cause"
        with pytest.raises(rv.CheckpointError, match=message):
            changes_until(point, lambda root=root: do(root), fail)  # type: ignore[misc]
    assert total > 5


@pytest.mark.parametrize("has_links", [True, False])
def test_a_save_that_fails_at_one_change_of_the_disk_leaves_no_file(
    has_links: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(errno.EPERM, "no hard links")

    if not has_links:
        monkeypatch.setattr(os, "link", link)
    num_failed = 0
    total = changes_until(None, lambda: save(tmp_path / "whole", 0, 1.0))
    for point in range(1, total + 1):
        root = tmp_path / str(point)
        faults = iter([OSError(errno.EIO, "Input/output error")])

        def fail_once(faults: Iterator[OSError] = faults) -> None:
            for fault in faults:
                raise fault

        try:
            changes_until(point, lambda root=root: save(root, 0, 1.0), fail_once)  # type: ignore[misc]
        except rv.CheckpointError:
            num_failed += 1
            assert not root.exists() or files_of(root) == {}
        else:  # It could not remove a file of its own.
            assert (root / "rank-00000.safetensors").exists()
    assert num_failed > 5


@pytest.mark.parametrize("code", [errno.EPERM, errno.ENOTSUP])
def test_file_system_without_hard_links_replaces_no_file_either(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: object) -> None:
        raise OSError(code, "no hard links")

    monkeypatch.setattr("rvdcomm.checkpoint.files.os.link", link)
    save(tmp_path, 0, 1.0)
    (tmp_path / "rank-00001.safetensors").write_bytes(b"another job's")
    part = PartFile(tmp_path, "rank-00001.safetensors", owner="me")
    with pytest.raises(FileExistsError):
        part.commit(replace=False)
    part.discard()
    (tmp_path / "rank-00001.safetensors").unlink()
    save(tmp_path, 1, 1.0)
    commit_shards(tmp_path, range(2))
    assert load(tmp_path) == values(1.0)
    assert len(files_of(tmp_path)) == 3


@pytest.mark.parametrize("text", [b"R(1)", b"shape(3)"])
def test_damaged_layout_in_a_header_is_a_checkpoint_error(text: bytes, tmp_path: Path) -> None:
    for rank in range(2):
        save(tmp_path, rank, 1.0)
    path = tmp_path / "rank-00001.safetensors"
    layout = b"R(1)V(1)D(1) shape(3)"
    damaged = layout.replace(text, b"?" * len(text))
    path.write_bytes(path.read_bytes().replace(layout, damaged))
    with pytest.raises(rv.CheckpointError, match=r"a header of \['rank-00000.* is damaged: cannot"):
        commit_shards(tmp_path, range(2))


def test_file_in_place_of_the_folder_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(rv.CheckpointError, match=r"saving shards of rank 0 into .*File exists"):
        save(tmp_path / "file", 0, 1.0)
    with pytest.raises(rv.CheckpointError, match="is no folder with a checkpoint"):
        commit_shards(tmp_path / "file", range(2))


def test_parents_of_a_new_folder_are_synced(tmp_path: Path) -> None:
    disk = Disk()
    with instead_of_os(disk):
        save(tmp_path / "a/b", 0, 1.0)
    kinds = [change.split()[0] for change in disk.changes]
    assert kinds[:4] == ["mkdir", "fsync", "mkdir", "fsync"]
    assert kinds[-1] == "fsync"


@pytest.mark.parametrize("to", ["sharded", "whole", "dcp"])
def test_files_are_synced_before_and_folders_after_each_rename(to: str, tmp_path: Path) -> None:
    # Only synced data survives a loss of power. A file is synced before it is renamed, and the
    # rename is synced before the journal records the file.
    src, disk = make("whole", tmp_path), Disk()
    with instead_of_os(disk):
        reshard(src, tmp_path / "dst", None, to=to)
    kinds = [change.split()[0] for change in disk.changes]
    renames = [i for i, kind in enumerate(kinds) if kind == "replace"]
    assert renames
    assert all(kinds[i - 1] == "fsync" for i in renames)
    assert all("fsync" in kinds[i + 1 : i + 3] for i in renames)


def test_destination_with_an_empty_journal_is_not_overwritten(tmp_path: Path) -> None:
    src, dst = make("whole", tmp_path), tmp_path / "dst"
    reshard(src, dst)
    (dst / "rvdcomm-journal.jsonl").write_bytes(b"")
    before = {path: path.stat().st_mtime_ns for path in dst.iterdir()}
    with pytest.raises(rv.CheckpointError, match=r"rvdcomm-journal.jsonl is empty, and .* is lost"):
        reshard(src, dst)
    assert {path: path.stat().st_mtime_ns for path in dst.iterdir()} == before
    with pytest.raises(rv.CheckpointError, match="has not finished"):
        open_checkpoint(dst)


# --- files of other libraries -------------------------------------------------------------------


@pytest.mark.parametrize(
    "names, message",
    [
        (["model-00001-of-00003"], "model-00001-of-00003.safetensors is one of 3 files, and "),
        (["model-00001-of-00002", "model-00002-of-00002"], "index.json is missing; copy all"),
        (["00002-of-00002"], "is one of 2 files"),
    ],
)
def test_numbered_files_without_an_index_are_rejected(
    names: list[str], message: str, tmp_path: Path
) -> None:
    for i, name in enumerate(names):
        save_file({f"w{i}": torch.ones(3)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(rv.CheckpointError, match=message):
        open_checkpoint(tmp_path)


def test_file_numbered_1_of_1_needs_no_index(tmp_path: Path) -> None:
    save_file({"w": torch.ones(3)}, tmp_path / "model-00001-of-00001.safetensors")
    assert set(open_checkpoint(tmp_path).tensors) == {"w"}


@pytest.mark.parametrize("to", ["sharded", "whole"])
def test_metadata_is_kept(to: str, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    metadata = {"format": "flax", "licence": "mine"}
    save_file({"w": torch.ones(3)}, tmp_path / "src/model.safetensors", metadata)
    reshard(tmp_path / "src", tmp_path / "one", to=to)
    reshard(tmp_path / "one", tmp_path / "two", to="whole")
    found = open_checkpoint(tmp_path / "two").metadata
    assert found == {key: (text,) for key, text in metadata.items()}


def test_metadata_that_the_form_cannot_store_is_rejected_or_dropped(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    save_file({"w": torch.ones(3)}, tmp_path / "src/model.safetensors", {"licence": "mine"})
    with pytest.raises(
        rv.CheckpointError, match="__metadata__ 'licence' cannot be kept: a checkpoint of torch"
    ):
        reshard(tmp_path / "src", tmp_path / "dst", to="dcp")
    report = reshard(tmp_path / "src", tmp_path / "dst", to="dcp", tensors_only=True)
    assert "left out, no tensors: __metadata__ licence\n" in str(report.plan)


def test_conflicting_metadata_is_rejected_or_dropped(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    for name in "ab":
        metadata = {"licence": name, "author": "me"}
        save_file({name: torch.ones(3)}, tmp_path / f"src/{name}.safetensors", metadata)
    with pytest.raises(rv.CheckpointError, match=r"'licence' .* different texts, 'a' and 'b'"):
        reshard(tmp_path / "src", tmp_path / "dst")
    reshard(tmp_path / "src", tmp_path / "dst", tensors_only=True)
    assert open_checkpoint(tmp_path / "dst").metadata == {"author": ("me",)}
    layouts = {"a": rv.Layout((3,), "R(1)V(1)D(1)")}
    assert load_shards(tmp_path / "src", layouts, 0)["a"].tolist() == [1, 1, 1]
