"""Folder: reads the files of a checkpoint, and none outside of it."""

from __future__ import annotations

import errno
import os
import stat
from io import FileIO
from pathlib import Path
from typing import Any

from rvdcomm.checkpoint.faults import naming
from rvdcomm.errors import CheckpointError
from rvdcomm.json_file import parse_json
from rvdcomm.text import quoted

# O_NONBLOCK: opening a pipe must not wait for its writer.
READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK
FOLDER = os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY

_Identity = tuple[int, int, int, int]
"""Device, inode, number of bytes and time of the last change (ns) of an open file."""


def check_file_name(name: object, said_by: str) -> str:
    """``name`` if it is a plain file name without a folder, else a CheckpointError."""
    if not isinstance(name, str) or Path(name).name != name or name in ("", "..") or "\0" in name:
        raise CheckpointError(
            f"{said_by} names the file {quoted(name)}; expected a plain name in the same folder."
        )
    return name


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
        file, identity = opened(descriptor, path)
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
        with self.open(name) as file, naming(self.root / name):
            return read_bounded(file, max_bytes)

    def read_json(self, name: str, max_bytes: int) -> Any:
        """The value of a JSON file; a LayoutError if the file is no JSON (``parse_json``)."""
        return parse_json(self.read(name, max_bytes))

    def _descriptor(self, name: str) -> int:
        path = self.root / name
        if self.follow_symlinks:
            return os.open(path, READ)
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
    descriptor = os.open(base, FOLDER)
    for i, part in enumerate(parts):
        flags = READ if i == len(parts) - 1 else FOLDER
        parent = descriptor
        try:
            descriptor = os.open(part, flags | os.O_NOFOLLOW, dir_fd=parent)
        finally:
            os.close(parent)
    return descriptor


def opened(descriptor: int, path: Path) -> tuple[FileIO, _Identity]:
    """The file of a descriptor, and its identity, which differs once the file has changed."""
    found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode):
        os.close(descriptor)
        raise CheckpointError(f"{path} is no regular file")
    identity = found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
    return os.fdopen(descriptor, "rb", buffering=0), identity


def read_file(path: Path, max_bytes: int) -> bytes:
    """The bytes of a file that the caller named; a CheckpointError if there are too many."""
    with opened(os.open(path, READ), path)[0] as file:
        return read_bounded(file, max_bytes)


def read_bounded(file: FileIO, max_bytes: int) -> bytes:
    # ``read(n)`` allocates n bytes at once, so n is the size of the file, not ``max_bytes``.
    size = os.fstat(file.fileno()).st_size
    if size > max_bytes:
        raise CheckpointError(f"it has {size} bytes, and up to {max_bytes} are read")
    return file.read(size)
