"""Journal: what of a reshard is done, so that a rerun goes on from there.

A JSON line says what was asked for; then comes a line for every batch of files that is complete,
and a last line when all is done. The journal only grows: a line that a crash cut off is dropped,
and a rerun of an interrupted run ends with the same bytes as a run that was never interrupted.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rvdcomm.checkpoint.stored import read_bounded
from rvdcomm.errors import CheckpointError
from rvdcomm.text import quoted

FILE_NAME = "rvdcomm-journal.jsonl"
TEMPORARY_SUFFIX = ".rvdcomm-partial"
MAX_BYTES = 1 << 30
_DONE = {"done": True}


@dataclass(frozen=True, slots=True)
class Written:
    """A complete file: the length and the checksum of each of its segments, in order."""

    segments: tuple[tuple[int, str], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return sum(num_bytes for num_bytes, _ in self.segments)


Batch = dict[str, Written]


class Journal:
    """The journal of folder ``root``, locked until ``close``; made with the folder if missing.

    Args:
        root: the destination.
        request: JSON values that decide every byte of the result.

    Raises:
        CheckpointError: the folder holds something else, the result of another request, or another
            process is at work in it.
    """

    def __init__(self, root: Path, request: Mapping[str, Any]) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root, self.path = root, root / FILE_NAME
        strangers = sorted(p.name for p in root.iterdir() if not _is_partial(p.name))
        if strangers and FILE_NAME not in strangers:
            raise CheckpointError(
                f"{root} is not empty: it holds {quoted(strangers[0])} and no {FILE_NAME} of an "
                "earlier run; use an empty or a new folder."
            )
        self.file = self.path.open("a+b", buffering=0)
        try:
            self._lock()
            self.batches, self.is_done = self._read(dict(request))
        except BaseException:
            self.file.close()
            raise
        for path in root.iterdir():
            if _is_partial(path.name):
                path.unlink()

    def _lock(self) -> None:
        try:
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(f"another process is resharding into {self.root}.") from None

    def _read(self, request: dict[str, Any]) -> tuple[list[Batch], bool]:
        lines, kept_bytes = read_lines(self.path)
        if not lines:
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

    def record(self, batch: Batch) -> None:
        """Note that these files are complete and under their names."""
        self._append({"files": {name: written.segments for name, written in batch.items()}})
        self.batches.append(batch)

    def recorded(self) -> list[Batch]:
        """All batches, as the file has them."""
        return _batches(self.path, read_lines(self.path)[0])[0]

    def finish(self) -> None:
        """Note that the checkpoint is complete."""
        if not self.is_done:
            self._append(_DONE)
            self.is_done = True

    def close(self) -> None:
        """Let others work in the folder."""
        self.file.close()

    def _append(self, value: Mapping[str, Any]) -> None:
        line = (json.dumps(value, separators=(",", ":")) + "\n").encode()
        before = os.fstat(self.file.fileno()).st_size
        try:
            while line:
                line = line[self.file.write(line) or 0 :]
            os.fsync(self.file.fileno())
        except OSError:
            # What a full disk took of the line must not stand before the next one.
            self.file.truncate(before)
            raise


def read_lines(path: Path) -> tuple[list[Any], int]:
    """The values of all whole lines, and the bytes that these take."""
    try:
        data = read_bounded(path, MAX_BYTES)
        kept = data[: data.rfind(b"\n") + 1]
        return [json.loads(line) for line in kept.splitlines()], len(kept)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(
            f"{path} is no journal: {quoted(str(error))}; remove the folder and start again."
        ) from None


def _batches(path: Path, lines: list[Any]) -> tuple[list[Batch], bool]:
    is_done = lines[-1] == _DONE
    try:
        return [
            {
                name: Written(tuple((int(size), str(sha256)) for size, sha256 in segments))
                for name, segments in line["files"].items()
            }
            for line in lines[1 : -1 if is_done else None]
        ], is_done
    except (KeyError, TypeError, ValueError, AttributeError):
        raise CheckpointError(f"{path} is no journal; remove the folder and start again.") from None


def is_unfinished(root: Path) -> bool:
    """Whether a reshard into this folder was begun and has not ended."""
    path = root / FILE_NAME
    return path.exists() and read_lines(path)[0][-1:] != [_DONE]


def _is_partial(name: str) -> bool:
    return name.endswith(TEMPORARY_SUFFIX)


def _difference(before: Any, now: dict[str, Any]) -> str:
    """The first entry in which two requests differ."""
    if not isinstance(before, dict):
        return "its journal names none"
    name = next((name for name in now if before.get(name) != now[name]), "version")
    if re.fullmatch("[0-9a-f]{64}", str(now.get(name))):
        return f"its {name} differ"
    return f"{name} was {quoted(before.get(name))} and is now {quoted(now.get(name))}"
