"""Files of a checkpoint: read without leaving the source's folder, written whole or not at all.

All system calls that open, change, name or remove a file of a checkpoint are in this module.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import stat
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import Any

from rvdcomm.errors import CheckpointError
from rvdcomm.json_file import parse_json
from rvdcomm.text import quoted

TEMPORARY_SUFFIX = ".rvdcomm-partial"
READ_BYTES = 1 << 20

# O_NONBLOCK: opening a pipe must not wait for its writer.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
_FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY
_WRITE = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW

_Identity = tuple[int, int, int, int]
"""Device, inode, number of bytes and time of the last change (ns) of an open file."""


def check_file_name(name: object, said_by: str) -> str:
    """``name`` if it is a plain file name without a folder, else a CheckpointError."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\0" in name:
        raise CheckpointError(
            f"{said_by} names the file {quoted(name)}; expected a plain name in the same folder."
        )
    return name


# --- reading ------------------------------------------------------------------------------------


class Folder:
    """The folder of a checkpoint, and the rule that says which files may be read for it.

    A link is followed if it leads to a file below the folder itself or, for a snapshot in a Hugging
    Face cache, below the cache of the same repository (``models--OWNER--NAME``). Links in the path
    of the folder itself are the caller's and are followed.

    Laws (tests/checkpoint/test_links.py): no other file is read, even if links change meanwhile;
    a file that is opened again has the same identity, size and time of change as before.
    """

    def __init__(self, root: str | Path, *, follow_symlinks: bool = False) -> None:
        self.root = Path(root)
        self.follow_symlinks = follow_symlinks
        if not self.root.is_dir():
            raise CheckpointError(f"{root} is no folder with a checkpoint.")
        real = Path(os.path.realpath(root))
        self._bases = [real, *_repository_caches(real)]
        self._identities: dict[str, _Identity] = {}

    def names(self) -> list[str]:
        """The names of all entries of the folder, sorted."""
        return sorted(os.listdir(self.root))

    def open(self, name: str) -> FileIO:
        """Open a file for reading.

        Raises:
            CheckpointError: the file is missing, is no regular file, is a link out of the folder,
                or changed since it was first opened.
        """
        check_file_name(name, str(self.root))
        try:
            descriptor = self._descriptor(name)
        except FileNotFoundError:
            raise CheckpointError(f"{self.root / name} is missing; copy it, too.") from None
        path = self.root / name
        file, identity = _opened(descriptor, path)
        if self._identities.setdefault(name, identity) != identity:
            file.close()
            raise CheckpointError(
                f"{path} changed while the checkpoint was read; read it again when nothing writes "
                "to it."
            )
        return file

    def version(self, name: str) -> tuple[int, int]:
        """Number of bytes of a file, and the time of its last change (ns)."""
        if name not in self._identities:
            self.open(name).close()
        _, _, num_bytes, changed_at = self._identities[name]
        return num_bytes, changed_at

    def read(self, name: str, max_bytes: int) -> bytes:
        """The bytes of a file, or a CheckpointError if there are more than ``max_bytes``."""
        with self.open(name) as file:
            return _read_bounded(file, max_bytes)

    def read_json(self, name: str, max_bytes: int) -> Any:
        """The value of a JSON file; a LayoutError if the file is no JSON (``parse_json``)."""
        return parse_json(self.read(name, max_bytes))

    def _descriptor(self, name: str) -> int:
        path = self.root / name
        if self.follow_symlinks:
            return os.open(path, _READ)
        real = Path(os.path.realpath(path))
        base = next((base for base in self._bases if real.is_relative_to(base)), None)
        if base is None:
            raise CheckpointError(
                f"{path} is a link that leads to {real}, outside of the folder {self._bases[-1]}; "
                "copy the file, or say --follow-symlinks (follow_symlinks=True) to read it."
            )
        try:
            return _open_without_links(base, real.relative_to(base).parts)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            raise CheckpointError(
                f"{path} is a link that leads back to itself or was changed while it was opened."
            ) from None


def _repository_caches(real: Path) -> list[Path]:
    """The cache of the Hugging Face repository if ``real`` is a snapshot in one, else empty."""
    return [
        parent.parent
        for parent in real.parents
        if parent.name == "snapshots" and parent.parent.name.startswith("models--")
    ]


def _open_without_links(base: Path, parts: tuple[str, ...]) -> int:
    """Open a file below ``base``, folder by folder, and follow no link on the way.

    ``parts`` come from a resolved path, so an entry that is a link now was replaced meanwhile.
    """
    descriptor = os.open(base, _FOLDER)
    for i, part in enumerate(parts):
        flags = _READ if i == len(parts) - 1 else _FOLDER
        parent = descriptor
        try:
            descriptor = os.open(part, flags | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
    return descriptor


def _opened(descriptor: int, path: Path) -> tuple[FileIO, _Identity]:
    """The file of a descriptor, and its identity, which differs once the file has changed."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no regular file")
    identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return os.fdopen(descriptor, "rb", buffering=0), identity


def read_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file that the caller named; a CheckpointError if there are too many."""
    with _opened(os.open(path, _READ), path)[0] as file:
        return _read_bounded(file, max_bytes)


def _read_bounded(file: FileIO, max_bytes: int) -> bytes:
    # ``read(n)`` allocates n bytes at once, so n is the size of the file, not ``max_bytes``.
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise CheckpointError(f"it has {size} bytes, and up to {max_bytes} are read")
    return file.read(size)


# --- writing ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Written:
    """A complete file: number of bytes and sha256 of each of its segments, in order."""

    segments: tuple[tuple[int, str], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of the file."""
        return sum(num_bytes for num_bytes, _ in self.segments)


class PartFile:
    """A file that is being written under a temporary name: segments, each with its checksum.

    Files of all ranks are written at the same time, so a file is open only during each write.
    """

    def __init__(self, root: Path, name: str) -> None:
        self.path = root / name
        self.temporary = root / f"{name}{TEMPORARY_SUFFIX}"
        self.segments: list[tuple[int, str]] = []
        self.segment_bytes = 0
        # A link under the temporary name is removed; nothing is written through it.
        self.discard()
        os.close(os.open(self.temporary, _WRITE | os.O_CREAT | os.O_EXCL, 0o666))

    def append(self, data: bytes | memoryview) -> None:
        """Write to the end of the current segment."""
        descriptor = os.open(self.temporary, _WRITE | os.O_APPEND)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)
        self.segment_bytes += len(data)

    def overwrite_start(self, data: bytes) -> None:
        """Replace the first bytes, which were written as a placeholder of the same length."""
        descriptor = os.open(self.temporary, _WRITE)
        try:
            write_all(descriptor, data)
        finally:
            os.close(descriptor)

    def end_segment(self, sha256: str) -> None:
        """End the current segment, whose bytes have this checksum."""
        self.segments.append((self.segment_bytes, sha256))
        self.segment_bytes = 0

    def commit(self) -> Written:
        """Put the bytes on the disk, then give the file its final name."""
        descriptor = os.open(self.temporary, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.fsync(descriptor)
            # Drops the cached pages, so that a verification reads from the disk, not from memory.
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
        os.replace(self.temporary, self.path)
        return Written(tuple(self.segments))

    def discard(self) -> None:
        """Remove the temporary file, if it still exists."""
        with suppress(FileNotFoundError):
            os.unlink(self.temporary)


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
        self.file, _ = _opened(descriptor, path)
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
        return _read_bounded(self.file, max_bytes)

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
    """The folder ``root``, made with its parents if missing."""
    os.makedirs(root, exist_ok=True)
    return Path(root)


def sync_folder(root: Path) -> None:
    """Put a folder's entries on the disk, so that the names of its files survive a crash."""
    descriptor = os.open(root, _FOLDER)
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


def remove_partial_files(root: Path) -> None:
    """Remove the temporary files of an earlier run."""
    for name in os.listdir(root):
        if name.endswith(TEMPORARY_SUFFIX):
            os.unlink(root / name)


def fault_of(path: Path, written: Written, *, read: bool) -> str | None:
    """How a file differs from what was written, or None; compares only lengths unless ``read``."""
    try:
        descriptor = os.open(path, _READ | os.O_NOFOLLOW)
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
    for num_bytes, sha256 in written.segments:
        digest, left = hashlib.sha256(), num_bytes
        while left and (data := file.read(min(left, READ_BYTES))):
            digest.update(data)
            left -= len(data)
        if digest.hexdigest() != sha256:
            return f"is damaged in bytes {start} to {start + num_bytes}"
        start += num_bytes
    return None
