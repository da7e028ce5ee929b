"""Faults of the operating system (a full disk, a failing one): errors that name file and remedy."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rvdcomm.errors import CheckpointError
from rvdcomm.units import bytes_text


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Give errors of the operating system the file's name, which calls on descriptors lack."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise


@contextmanager
def as_checkpoint_error(what: str, root: str | Path, then: str = "do it again") -> Iterator[None]:
    """Raise errors of the operating system in this block as a ``CheckpointError``.

    Args:
        what: what the block does, such as ``"saving shards of rank 3 into step-9"``.
        root: the folder of the checkpoint.
        then: what to do after the cause is removed, with what is true of the files.
    """
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{what} stopped: {error}; {_remedy(root, error)}{then}.") from error


def _remedy(root: str | Path, error: OSError) -> str:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        real = Path(os.path.realpath(root))
        folder = next(path for path in (real, *real.parents) if path.exists())
        return f"make room ({bytes_text(shutil.disk_usage(folder).free)} are free) and "
    return "remove the cause and "
