"""Files: written under another name, then renamed, so that a file that is there is complete."""

from __future__ import annotations

import hashlib
import os
from contextlib import suppress
from pathlib import Path

from rvdcomm.checkpoint.journal import TEMPORARY_SUFFIX, Written

READ_BYTES = 1 << 20


class PartFile:
    """A file that is being written: segments, each with its checksum, one after another.

    It is opened for each write: as many files are in work as there are ranks.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self.temporary = root / f"{name}{TEMPORARY_SUFFIX}"
        self.segments: list[tuple[int, str]] = []
        self.segment_bytes = 0
        self.temporary.write_bytes(b"")

    def append(self, data: bytes | memoryview) -> None:
        """Write to the end of the current segment."""
        with self.temporary.open("ab", buffering=0) as file:
            left = memoryview(data)
            while left:
                left = left[file.write(left) or 0 :]
        self.segment_bytes += len(data)

    def end_segment(self, sha256: str) -> None:
        """Say the checksum of what was written since the last segment's end."""
        self.segments.append((self.segment_bytes, sha256))
        self.segment_bytes = 0

    def commit(self) -> Written:
        """Give the file its name, once its bytes are on the disk."""
        with self.temporary.open("rb") as file:
            os.fsync(file.fileno())
            # What is verified is then read from the disk, not from memory.
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        self.temporary.replace(self.path)
        return Written(tuple(self.segments))

    def discard(self) -> None:
        """Remove what is not complete."""
        with suppress(FileNotFoundError):
            self.temporary.unlink()


def sync_folder(root: Path) -> None:
    """Put the names of a folder's files on the disk."""
    descriptor = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_file(root: Path, name: str, data: bytes) -> None:
    """Write a whole file; readers see all of it or none."""
    part = PartFile(root, name)
    try:
        part.append(data)
        part.commit()
    finally:
        part.discard()
    sync_folder(root)


def fault_of(path: Path, written: Written, *, read: bool) -> str | None:
    """How a file differs from what was written, or None; only its length counts unless ``read``."""
    try:
        size = path.stat().st_size
        if size != written.num_bytes:
            return f"has {size} bytes, {written.num_bytes} were written"
        return _damage(path, written) if read else None
    except FileNotFoundError:
        return "is missing"


def _damage(path: Path, written: Written) -> str | None:
    start = 0
    with path.open("rb", buffering=0) as file:
        for num_bytes, sha256 in written.segments:
            digest, left = hashlib.sha256(), num_bytes
            while left and (data := file.read(min(left, READ_BYTES))):
                digest.update(data)
                left -= len(data)
            if digest.hexdigest() != sha256:
                return f"is damaged in bytes {start} to {start + num_bytes}"
            start += num_bytes
    return None
