"""Crashes: a process that dies before, or in the middle of, its k-th change of the disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest

from rvdcomm.checkpoint import files

CHANGES = frozenset({"makedirs", "open", "write", "fsync", "ftruncate", "replace", "unlink"})
"""Calls of ``os`` by which ``files`` changes the disk; ``open`` counts if it creates a file."""


class CrashError(BaseException):
    """The process is dead. No ``except`` of the code under test may catch it."""


def crash() -> None:
    raise CrashError


class Disk:
    """The ``os`` of ``files`` until change number ``last``; nothing changes the disk after that.

    Half of the data of a write that is interrupted reaches the file.

    Attributes:
        changes: the changes until now, as texts.
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
            # Dead processes run no ``finally``: after the end, all changes fail.
            if self.last is not None and len(self.changes) + 1 >= self.last:
                if name == "write" and len(self.changes) + 1 == self.last:
                    real(args[0], bytes(args[1][: len(args[1]) // 2]))
                self.changes.append(name)
                self.end()
            self.changes.append(f"{name} {args[0]}")
            return real(*args, **options)

        return change


def changes_until(last: int | None, do: Callable[[], Any], end: Callable[[], None] = crash) -> int:
    """Run ``do`` and let it die at change number ``last``; how many changes it made or began."""
    disk = Disk(last, end)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "os", disk)
        try:
            do()
        except CrashError:
            assert last is not None
    return len(disk.changes) if last is None else min(last, len(disk.changes))
