"""Laws of JSON files: reading is bounded, writing is all or nothing, entries have their type."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import pytest

import rvdcomm as rv
from rvdcomm.json_file import entry, read_json, write_json


def test_read_undoes_write(tmp_path: Path) -> None:
    values = {"a": [1, 2.5, None, "ü"], "b": {"c": True}}
    write_json(tmp_path / "file", values)
    assert read_json(tmp_path / "file", 1000) == values


@pytest.mark.parametrize("max_bytes, is_read", [(5, True), (4, False)])
def test_file_longer_than_max_bytes_is_rejected(
    max_bytes: int, is_read: bool, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("[1,2]")
    if is_read:
        assert read_json(tmp_path / "file", max_bytes) == [1, 2]
    else:
        with pytest.raises(rv.LayoutError, match="it is longer than 4 bytes"):
            read_json(tmp_path / "file", max_bytes)


@pytest.mark.parametrize("value", [float("nan"), {"a": float("inf")}])
def test_value_that_json_cannot_express_leaves_the_file_unchanged(
    value: Any, tmp_path: Path
) -> None:
    write_json(tmp_path / "file", "before")
    with pytest.raises(rv.LayoutError, match="file cannot be written"):
        write_json(tmp_path / "file", value)
    assert read_json(tmp_path / "file", 1000) == "before"


def test_new_file_has_default_permissions_and_old_file_keeps_its_permissions(
    tmp_path: Path,
) -> None:
    (tmp_path / "plain").touch()
    write_json(tmp_path / "new", 1)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == stat.S_IMODE(
        (tmp_path / "plain").stat().st_mode
    )
    (tmp_path / "new").chmod(0o640)
    write_json(tmp_path / "new", 2)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640


def test_write_follows_a_symbolic_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_json(tmp_path / "link", 1)
    assert (tmp_path / "link").is_symlink()
    assert read_json(tmp_path / "file", 10) == 1


def test_write_to_a_device_does_not_replace_it(tmp_path: Path) -> None:
    write_json("/dev/null", 1)
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(
    "value, kind, found",
    [("a", str, "a"), (3, int, 3), (3, float, 3.0), ([1], list, [1]), (True, bool, True)],
)
def test_entry_returns_a_value_of_the_requested_type(value: Any, kind: type, found: Any) -> None:
    assert entry({"name": value}, "name", kind) == found


@pytest.mark.parametrize(
    "values, kind, message",
    [
        ([], str, "expected an object with 'name', got"),
        ({}, str, "'name' is missing"),
        ({"name": 1}, str, "'name' must be a text, got 1"),
        ({"name": True}, int, "'name' must be an integer, got True"),
        ({"name": True}, float, "'name' must be a finite number, got True"),
        ({"name": float("inf")}, float, "'name' must be a finite number, got inf"),
        ({"name": 10**400}, float, "'name' must be a finite number, got 1000"),
        ({"name": "a" * 10**6}, list, "'name' must be a list, got 'aaa"),
    ],
)
def test_entries_of_another_type_are_rejected(values: Any, kind: type, message: str) -> None:
    with pytest.raises(rv.LayoutError, match=message) as error:
        entry(values, "name", kind)
    assert len(str(error.value)) < 300
