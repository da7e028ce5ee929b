"""Undo what a process made on this machine, however the process ends.

A ``with`` block undoes on return and on exceptions. This module adds the other ends: SIGINT,
SIGTERM and SIGHUP become exceptions, so that ``with`` and ``finally`` blocks run, and ``atexit``
undoes what no ``with`` block was left for. After SIGKILL nobody can tidy up;
``python -m bench.cluster --clean`` does it later.
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
    """The undos that are still due, and the signal handlers in force while there are any.

    Invariant: our handlers are installed exactly while ``undos`` is not empty (in the main thread,
    the only one that Python lets install any); ``previous`` holds those they replaced.
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
            # What shells report for a process that a signal ended.
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
    """Hold the signals back until the block ends, so that nothing is left half made.

    They are held only while an undo is registered; other threads never see signals in Python.
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
            # Our handler, or the one put back in the block: either way the signal's due effect.
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
    """Forget ``undo``; with the last one, the signal handlers of before are back."""
    if undo in _registry.undos:
        _registry.undos.remove(undo)
    if not _registry.undos and _in_main_thread():
        _registry.restore()


@atexit.register
def _undo_all() -> None:
    if _registry.owner_pid == os.getpid():
        for undo in reversed(_registry.undos[:]):
            undo()
