"""Files of a checkpoint: written whole or not at all.

All system calls that change, name or remove a file of a checkpoint are in this module.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rvdcomm.checkpoint.checksums import sum_like
from rvdcomm.checkpoint.faults import naming
from rvdcomm.checkpoint.folder import READ, opened, read_bounded
from rvdcomm.errors import CheckpointError
from rvdcomm.file_name import beside
from rvdcomm.whole_file import sync_folder as sync_entries

TEMPORARY_SUFFIX = ".rvdcomm-partial"
READ_BYTES = 1 << 20

_WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW


@dataclass(frozen=True, slots=True)
class Written:
    """A complete file: number of bytes and checksum of each of its segments, in order."""

    segments: tuple[tuple[int, str], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return sum(num_bytes for num_bytes, _ in self.segments)


class PartFile:
    """A file that is being written under a temporary name: segments, each with its checksum.

    Files of all ranks are written at the same time, so a file is open only during each write.

    Args:
        root: the folder of the file.
        name: the final name.
        owner: a text that no other process has which may write a file of this name now; empty if
            the folder is locked.
    """

    def __init__(self, root: Path, name: str, owner: str = "") -> None:
        self.path = root / name
        self.temporary = root / beside(name, f"{'.' if owner else ''}{owner}{TEMPORARY_SUFFIX}")
        self.segments: list[tuple[int, str]] = []
        self.segment_bytes = 0
        # A link under the temporary name is removed; nothing is written through it.
        self.discard()
        try:
            with naming(self.path):
                os.close(os.open(self.temporary, _WRITE | os.O_CREAT | os.O_EXCL, 0o666))
        except OSError:
            self.discard()
            raise

    def append(self, data: bytes | memoryview) -> None:
        """Write to the end of the current segment."""
        self._write(data, os.O_APPEND)
        self.segment_bytes += len(data)

    def overwrite_start(self, data: bytes) -> None:
        """Replace the first bytes, which were written as a placeholder of the same length."""
        self._write(data, 0)

    def _write(self, data: bytes | memoryview, flags: int) -> None:
        with naming(self.path):
            descriptor = os.open(self.temporary, _WRITE | flags)
            try:
                write_all(descriptor, data)
            finally:
                os.close(descriptor)

    def end_segment(self, checksum: str) -> None:
        """End the current segment, whose bytes have this checksum."""
        self.segments.append((self.segment_bytes, checksum))
        self.segment_bytes = 0

    def commit(self, *, replace: bool = True) -> Written:
        """Put the bytes on the disk, then give the file its final name.

        Raises:
            FileExistsError: there is a file of that name, and ``replace`` is false.
        """
        with naming(self.path):
            descriptor = os.open(self.temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.fsync(descriptor)
                # Drops the cached pages, so that a verification reads from the disk.
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)
            if replace:
                os.replace(self.temporary, self.path)
            else:
                _put(self.temporary, self.path)
        return Written(tuple(self.segments))

    def discard(self) -> None:
        """Remove the temporary file, if it still exists and can be removed."""
        with suppress(OSError):
            os.unlink(self.temporary)


def _put(temporary: Path, path: Path) -> None:
    """Give a file its final name if no file has that name yet: of two processes, one succeeds.

    The temporary name may stay, too (``PartFile.discard``).
    """
    try:
        os.link(temporary, path)
        return
    except FileExistsError:
        raise
    except OSError as error:
        if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK):
            raise
    # Some file systems have no second names. There an empty file takes the name first.
    descriptor = os.open(path, _WRITE | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        os.close(descriptor)
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            os.unlink(path)
        raise


class LogFile:
    """A file that grows by whole lines, locked by this process until ``close``; made if missing.

    Raises:
        CheckpointError: another process has locked the file, or it is a link or no regular file.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            descriptor = os.open(path, flags, 0o666)
        except OSError as error:
            if error.errno != errno.ELOOP:
                raise
            raise CheckpointError(f"{path} is a link; remove it, or use another folder.") from None
        self.file, _ = opened(descriptor, path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.file.close()
            raise CheckpointError(
                f"another process is resharding into {path.parent}; wait for it, or use another "
                "folder."
            ) from None

    def read(self, max_bytes: int) -> bytes:
        """All bytes of the file; a CheckpointError if there are more than ``max_bytes``."""
        self.file.seek(0)
        return read_bounded(self.file, max_bytes)

    def append(self, line: bytes) -> None:
        """Append a line and put it on the disk; after an error the file has its old content."""
        descriptor = self.file.fileno()
        before = os.fstat(descriptor).st_size
        try:
            write_all(descriptor, line)
            os.fsync(descriptor)
        except OSError:
            # A part of the line that fitted on a full disk must not precede the next line.
            os.ftruncate(descriptor, before)
            raise

    def truncate(self, num_bytes: int) -> None:
        """Keep only the first ``num_bytes`` bytes."""
        os.ftruncate(self.file.fileno(), num_bytes)

    def close(self) -> None:
        """Close the file, which unlocks it."""
        self.file.close()


def write_all(descriptor: int, data: bytes | memoryview) -> None:
    """Write all of ``data``; one system call may write only a part."""
    left = memoryview(data)
    while left:
        left = left[os.write(descriptor, left) :]


def make_folder(root: str | Path) -> Path:
    """The folder ``root``, made with its parents if missing; their names survive a crash."""
    root = Path(root)
    missing = []
    for path in (root, *root.parents):
        if path.is_dir():
            break
        missing.append(path)
    for path in reversed(missing):
        try:
            with naming(path):
                os.mkdir(path)
        except FileExistsError:  # Another rank made it meanwhile, or it is no folder.
            if not path.is_dir():
                raise
        # A folder into which a process may write, but which it may not list, cannot be synced.
        with suppress(PermissionError):
            sync_folder(path.parent)
    return root


def sync_folder(root: Path) -> None:
    """Put a folder's entries on the disk, so that the names of its files survive a crash."""
    with naming(root):
        sync_entries(root)


def write_file(root: Path, name: str, data: bytes) -> None:
    """Write a whole file; readers see all of it or none."""
    part = PartFile(root, name)
    try:
        part.append(data)
        part.commit()
    finally:
        part.discard()
    sync_folder(root)


def write_new_file(root: Path, name: str, data: bytes, owner: str) -> None:
    """Like ``write_file``, for a folder that is not locked (``PartFile``).

    Raises:
        FileExistsError: there is a file of that name.
    """
    part = PartFile(root, name, owner)
    try:
        part.append(data)
        part.commit(replace=False)
    finally:
        part.discard()
    sync_folder(root)


def remove_partial_files(root: Path) -> None:
    """Remove the temporary files of an earlier run."""
    remove_files(root, lambda name: name.endswith(TEMPORARY_SUFFIX))


def remove_files(root: Path, is_removed: Callable[[str], object]) -> None:
    """Remove files by their names; another process may remove them at the same time."""
    for name in os.listdir(root):
        if is_removed(name):
            with suppress(FileNotFoundError):
                os.unlink(root / name)


def fault_of(path: Path, written: Written, *, read: bool) -> str | None:
    """How a file differs from what was written, or None; compares only lengths unless ``read``."""
    try:
        descriptor = os.open(path, READ | os.O_NOFOLLOW)
    except FileNotFoundError:
        return "is missing"
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        return "is a link"
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        size = os.fstat(descriptor).st_size
        if size != written.num_bytes:
            return f"has {size} bytes, {written.num_bytes} were written"
        return _damage(file, written) if read else None


def _damage(file: Any, written: Written) -> str | None:
    start = 0
    for num_bytes, checksum in written.segments:
        found, left = sum_like(checksum), num_bytes
        while left and (data := file.read(min(left, READ_BYTES))):
            found.update(data)
            left -= len(data)
        if found.text() != checksum:
            return f"is damaged in bytes {start} to {start + num_bytes}"
        start += num_bytes
    return None
