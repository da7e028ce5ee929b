"""Laws of the table of winners: it is bounded and stored in a file, and makes no call fail."""

from __future__ import annotations

import json
import logging
import multiprocessing as mp
import os
from pathlib import Path

import pytest

import rvdcomm as rv
from rvdcomm.calibration import winners
from rvdcomm.calibration.winners import Winner, Winners, cache_file, key_of

FAST = Winner("flat", "dist", 1e-3, 2e-3)
SLOW = Winner("model", "auto", 3e-3, 3e-3)
HOSTS = rv.Topology.hosts([range(2), range(2, 4)], rv.Link(1e-5, 1e9), rv.Link(1e-4, 1e8))


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rvdcomm" / "tune.json"


def test_the_file_is_in_the_users_cache_folder(
    cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cache_file() == cache
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_file() == tmp_path / ".cache" / "rvdcomm" / "tune.json"


def test_stored_winner_is_found_by_the_same_and_by_a_new_table() -> None:
    here = Winners()
    for winner in (SLOW, FAST):
        here.put("key", winner)
        assert here.get("key") == Winners().get("key") == winner
    assert here.get("other") is None


def test_a_cleared_table_reads_the_file_again(cache: Path) -> None:
    here = Winners()
    here.put("key", FAST)
    cache.unlink()
    assert here.get("key") == FAST
    here.clear()
    assert here.get("key") is None


BROKEN = {
    "empty": "",
    "truncated": '{"version": 1, "entries": {"key": {"rec',
    "other version": '{"version": 2, "entries": {}}',
    "no entries": '{"version": 1}',
    "other type": "[1, 2]",
    "hostile": "[" * 100_000,
    "NaN": '{"version": 1, "entries": {"key": {"recipe": "a", "executor": "b", "secs": NaN}}}',
    "incomplete entry": '{"version": 1, "entries": {"key": {"recipe": "a"}}}',
    "long name": json.dumps({"version": 1, "entries": {"key": {"recipe": "a" * 65}}}),
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_broken_file_is_ignored_with_a_warning_and_replaced(
    text: str, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir()
    cache.write_text(text)
    assert Winners().get("key") is None
    assert "ignoring" in caplog.text
    assert "will be replaced" in caplog.text
    Winners().put("key", FAST)
    caplog.clear()
    assert Winners().get("key") == FAST
    assert caplog.text == ""


def test_unwritable_file_gives_a_warning(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.parent.write_text("a file where the folder should be")
    here = Winners()
    here.put("key", FAST)
    assert here.get("key") == FAST
    assert "cannot remember the fastest plans" in caplog.text


def test_table_and_file_are_bounded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(winners, "MAX_ENTRIES", 3)
    here = Winners()
    for i in range(5):
        here.put(f"key {i}", FAST)
    assert list(json.loads(cache.read_text())["entries"]) == ["key 2", "key 3", "key 4"]
    assert len(here._known) == 3


def put_some(first: int) -> None:
    logging.disable()
    for i in range(first, first + 5):
        Winners().put(f"key {i}", FAST)


def test_concurrent_writes_of_processes_lose_no_entry(cache: Path) -> None:
    context = mp.get_context("fork")
    processes = [context.Process(target=put_some, args=(5 * i,)) for i in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(30)
    assert len(json.loads(cache.read_text())["entries"]) == 20
    assert sorted(os.listdir(cache.parent)) == ["tune.json", "tune.lock"]


# --- keys ---------------------------------------------------------------------------------------


def key(
    shape: tuple[int, int] = (64, 64),
    dst: str = "R(4)V(1)D(1,1)",
    topology: rv.Topology = HOSTS,
    limit: int | None = None,
    where: str = "gloo",
) -> str:
    src = rv.Layout(shape, "R(1)V(1)D(4,1)")
    return key_of(rv.plan(src, rv.Layout(shape, dst), "float32", topology), limit, where)


def test_tensors_of_similar_size_share_a_key() -> None:
    assert key((64, 64)) == key((64, 100)) == key((100, 64))


@pytest.mark.parametrize(
    "other",
    [
        key((128, 64)),
        key((66, 64)),
        key(dst="R(1)V(1)D(1,4)"),
        key(topology=rv.Topology.single_host(4, 1e-5, 1e9)),
        key(limit=10**6),
        key(where="nccl"),
    ],
    ids=["size", "ragged", "pair", "topology", "limit", "world"],
)
def test_key_depends_on_size_layouts_topology_limit_and_world(other: str) -> None:
    assert other != key()
