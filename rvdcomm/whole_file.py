"""Whole files: written under another name, and given their own when they are complete.

A reader sees the old file or the new one, never a part, wherever the writer stops: at a full disk,
at an error, or because it is killed. Files that are read together are one folder
(``superscaler_core.run.program_folder``, ``rvdcomm.checkpoint``).
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rvdcomm.file_name import beside

__all__ = ["replacing", "sync_folder", "sync_tree", "write_whole"]

_MOST_SUFFIX_BYTES = 16
"""A longer suffix is no kind of file; with it the temporary name might be too long."""


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A name beside ``path`` for a new file, which replaces ``path`` when the block ends.

    The name has the suffix of ``path``, by which some libraries choose a format. A link is
    followed. A device or a pipe cannot be replaced, and is written directly.

    Law (tests/test_whole_file.py): if the block or a system call fails, ``path`` is as before, and
    nothing is left beside it.

    Raises:
        OSError: the file cannot be written; it names ``path``.
    """
    path = Path(path)
    if path.exists() and not path.is_file():
        yield path
        return
    path = path.resolve()
    suffix = path.suffix if len(os.fsencode(path.suffix)) <= _MOST_SUFFIX_BYTES else ""
    temporary = path.with_name(beside(path.name, f".{secrets.token_hex(8)}{suffix}"))
    try:
        yield temporary
        _sync(temporary)
        if path.exists():
            os.chmod(temporary, path.stat().st_mode & 0o777)
        os.replace(temporary, path)
    except OSError as error:
        if error.errno is None or error.filename not in (None, str(temporary)):
            raise
        # The caller knows nothing of the temporary name.
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        with suppress(OSError):
            os.unlink(temporary)
    sync_folder(path.parent)


def write_whole(path: str | Path, data: str | bytes) -> None:
    """Write a file of a text (in UTF-8) or of bytes, as ``replacing`` does."""
    with replacing(path) as temporary:
        temporary.write_bytes(data.encode() if isinstance(data, str) else data)


def sync_folder(folder: Path) -> None:
    """Put a folder's entries on the disk, so that the names of its files survive a crash."""
    _sync(folder)


def sync_tree(folder: Path) -> None:
    """Put all files and folders below ``folder`` on the disk, and itself."""
    for inner, _, files in os.walk(folder, topdown=False):
        for name in files:
            _sync(Path(inner, name))
        _sync(Path(inner))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
