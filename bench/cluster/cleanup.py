"""Cleanup: undo what a process created on this machine, however the process ends.

A ``with`` block cleans up on return and on exceptions. This module covers the other ways to end:
SIGINT, SIGTERM and SIGHUP become exceptions, so that ``with`` and ``finally`` blocks run, and
``atexit`` undoes everything that no ``with`` block has undone. After SIGKILL, no code of the
process runs; ``python -m bench.cluster --clean`` cleans up later.
"""

from __future__ import annotations

import atexit
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class _Registry:
    """The pending undo functions, and our signal handlers while there are any.

    Invariant: our handlers are installed exactly while ``undos`` is not empty, and ``previous``
    holds the handlers that they replaced. Only the main thread can install handlers in Python.
    """

    def __init__(self) -> None:
        self.undos: list[Callable[[], None]] = []
        self.owner_pid = 0
        self.previous: dict[int, Any] = {}
        self.shield_depth = 0
        self.held: int | None = None

    def handle(self, signum: int, frame: FrameType | None) -> None:
        if self.shield_depth:
            self.held = signum
            return
        previous = self.previous.get(signum)
        if callable(previous):
            previous(signum, frame)
        else:
            # The exit status that shells report for a process that a signal ended.
            raise SystemExit(128 + signum)

    def install(self) -> None:
        for signum in _SIGNALS:
            previous = signal.getsignal(signum)
            # An ignored signal ends nothing (nohup, background jobs), so it stays ignored.
            if previous is not signal.SIG_IGN:
                self.previous[signum] = previous
                signal.signal(signum, self.handle)

    def restore(self) -> None:
        while self.previous:
            signum, previous = self.previous.popitem()
            # None: a handler that was not installed from Python, which cannot be put back.
            signal.signal(signum, signal.SIG_DFL if previous is None else previous)


_registry = _Registry()


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


@contextmanager
def shielded() -> Iterator[None]:
    """Delay the signals until the block ends, so that its work is not left half done.

    Signals are delayed only while an undo is registered. In other threads the block does nothing,
    because Python handles signals only in the main thread.
    """
    if not _in_main_thread():
        yield
        return
    _registry.shield_depth += 1
    try:
        yield
    finally:
        _registry.shield_depth -= 1
        held = _registry.held
        if held is not None and not _registry.shield_depth:
            _registry.held = None
            # Handled now by our handler, or by the previous one if the block has restored it.
            signal.raise_signal(held)


def register(undo: Callable[[], None]) -> None:
    """Call ``undo`` before this process ends, unless ``unregister`` comes first.

    ``undo`` must be safe to call twice. A forked child never runs its parent's undos.
    """
    if _registry.owner_pid != os.getpid():
        _registry.owner_pid = os.getpid()
        _registry.undos.clear()
    if not _registry.undos and _in_main_thread():
        _registry.install()
    _registry.undos.append(undo)


def unregister(undo: Callable[[], None]) -> None:
    """Forget ``undo``; after the last one, restore the previous signal handlers."""
    if undo in _registry.undos:
        _registry.undos.remove(undo)
    if not _registry.undos and _in_main_thread():
        _registry.restore()


@atexit.register
def _undo_all() -> None:
    if _registry.owner_pid == os.getpid():
        for undo in reversed(_registry.undos[:]):
            undo()
