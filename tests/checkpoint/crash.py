"""Crashes: simulate a process that dies before or during its k-th change of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from rvdcomm import whole_file
from rvdcomm.checkpoint import files

CHANGES = frozenset({"mkdir", "open", "write", "fsync", "ftruncate", "link", "replace", "unlink"})
"""Functions of ``os`` that change the disk in ``files``; ``open`` counts if it creates a file."""


class CrashError(BaseException):
    """The simulated death of the process; no ``except`` of the code under test may catch it."""


def crash() -> None:
    raise CrashError


class Disk:
    """A substitute for ``os`` in ``files`` that calls ``end`` at change number ``last``.

    After this change, all further changes fail. If the change is a write, half of its data reaches
    the file.

    Attributes:
        changes: the changes so far, as texts.
    """

    def __init__(self, last: int | None = None, end: Callable[[], None] = crash) -> None:
        self.changes: list[str] = []
        self.last, self.end = last, end

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in CHANGES:
            return real

        def change(*args: Any, **options: Any) -> Any:
            if name == "open" and not args[1] & os.O_CREAT:
                return real(*args, **options)
            # A dead process runs no ``finally`` block, so after the end all changes fail.
            if self.last is not None and len(self.changes) + 1 >= self.last:
                if name == "write" and len(self.changes) + 1 == self.last:
                    real(args[0], bytes(args[1][: len(args[1]) // 2]))
                self.changes.append(name)
                self.end()
            self.changes.append(f"{name} {args[0]}")
            return real(*args, **options)

        return change


@contextmanager
def instead_of_os(disk: Disk) -> Iterator[None]:
    """A block in which the modules that change files of checkpoints use ``disk``."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", disk)
        patch.setattr(whole_file, "os", disk)
        yield


def changes_until(last: int | None, do: Callable[[], Any], end: Callable[[], None] = crash) -> int:
    """Run ``do``, crash it at change ``last``, and return how many changes it made or began."""
    disk = Disk(last, end)
    with instead_of_os(disk):
        try:
            do()
        except CrashError:
            assert last is not None
    return len(disk.changes) if last is None else min(last, len(disk.changes))
