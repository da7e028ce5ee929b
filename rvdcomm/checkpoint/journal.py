"""Journal: records which files of a reshard are complete, so that a rerun continues from there.

The first line is the request. One line for every batch of complete files follows, and a last line
when the reshard is done. Lines are only appended; a line that a crash cut off is dropped. A rerun
of an interrupted run ends with the same bytes as a run that was never interrupted.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rvdcomm.checkpoint.files import (
    TEMPORARY_SUFFIX,
    LogFile,
    Written,
    make_folder,
    remove_partial_files,
)
from rvdcomm.checkpoint.folder import Folder
from rvdcomm.errors import CheckpointError
from rvdcomm.text import quoted

FILE_NAME = "rvdcomm-journal.jsonl"
MAX_BYTES = 1 << 30
_DONE = {"done": True}

WrittenFiles = dict[str, Written]


class Journal:
    """The journal of folder ``root``, locked until ``close``; made with the folder if missing.

    Args:
        root: the destination.
        request: JSON values that decide every byte of the result.

    Raises:
        CheckpointError: the folder holds other data or the result of another request, or another
            process is resharding into it.
    """

    def __init__(self, root: Path, request: Mapping[str, Any]) -> None:
        self.root, self.path = make_folder(root), root / FILE_NAME
        names = Folder(root).names()
        others = [n for n in names if n != FILE_NAME and not n.endswith(TEMPORARY_SUFFIX)]
        if others and FILE_NAME not in names:
            raise CheckpointError(
                f"{root} is not empty: it holds {quoted(others[0])} and no {FILE_NAME} of an "
                "earlier run; use an empty or a new folder."
            )
        self.file = LogFile(self.path)
        try:
            self.batches, self.is_done = self._read(dict(request), others)
            remove_partial_files(root)
        except BaseException:
            self.file.close()
            raise

    def _read(self, request: dict[str, Any], others: list[str]) -> tuple[list[WrittenFiles], bool]:
        lines, kept_bytes = _lines(self.path, self.file.read(MAX_BYTES))
        if not lines:
            if others:
                raise CheckpointError(
                    f"{self.path} is empty, and {self.root} holds {quoted(others[0])}: which "
                    "request that belongs to is lost; use a new folder."
                )
            self.file.truncate(0)
            self._append(request)
            return [], False
        if lines[0] != request:
            raise CheckpointError(
                f"{self.root} holds the result of another request: {_difference(lines[0], request)}"
                "; ask for the same, or use another folder."
            )
        self.file.truncate(kept_bytes)
        return _batches(self.path, lines)

    def record(self, batch: WrittenFiles) -> None:
        """Record that these files are complete and have their final names."""
        self._append({"files": {name: written.segments for name, written in batch.items()}})
        self.batches.append(batch)

    def recorded(self) -> list[WrittenFiles]:
        """All batches, read back from the file."""
        return _batches(self.path, _lines(self.path, self.file.read(MAX_BYTES))[0])[0]

    def finish(self) -> None:
        """Record that the checkpoint is complete."""
        if not self.is_done:
            self._append(_DONE)
            self.is_done = True

    def close(self) -> None:
        """Unlock the folder for other processes."""
        self.file.close()

    def _append(self, value: Mapping[str, Any]) -> None:
        self.file.append((json.dumps(value, separators=(",", ":")) + "\n").encode())


def is_finished(folder: Folder) -> bool:
    """Whether the reshard that made the folder's journal has ended."""
    return _lines(folder.root / FILE_NAME, folder.read(FILE_NAME, MAX_BYTES))[0][-1:] == [_DONE]


def _lines(path: Path, data: bytes) -> tuple[list[Any], int]:
    """The values of all complete lines, and the number of bytes of these lines."""
    kept = data[: data.rfind(b"\n") + 1]
    try:
        return [json.loads(line) for line in kept.splitlines()], len(kept)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no journal: {quoted(str(error))}; remove the folder and start again."
        ) from None


def _batches(path: Path, lines: list[Any]) -> tuple[list[WrittenFiles], bool]:
    is_done = lines[-1] == _DONE
    try:
        return [
            {
                name: Written(tuple((int(size), str(checksum)) for size, checksum in segments))
                for name, segments in line["files"].items()
            }
            for line in lines[1 : -1 if is_done else None]
        ], is_done
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path} is no journal; remove the folder and start again.") from None


def _difference(before: Any, now: dict[str, Any]) -> str:
    """The first entry in which two requests differ."""
    if not isinstance(before, dict):
        return "its journal names none"
    name = next((name for name in now if before.get(name) != now[name]), "version")
    if re.fullmatch("[0-9a-f]{64}", str(now.get(name))):
        return f"its {name} differ"
    return f"{name} was {quoted(before.get(name))} and is now {quoted(now.get(name))}"
