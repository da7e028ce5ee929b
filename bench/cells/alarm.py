"""Alarm: end what takes too long, also if it waits for other processes."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AGAIN_SECS = 5.0
"""Seconds from one signal to the next: Python drops an exception that is raised in a finalizer."""


class LateError(Exception):
    """The time is over."""


@contextmanager
def stopped_after(secs: float) -> Iterator[None]:
    """Raise a ``LateError`` in the block, which is in the main thread, if it takes longer.

    It uses SIGUSR1, since SIGALRM interrupts the planners inside (``hurried``).

    Args:
        secs: how long the block may take; 0 for no limit.
    """
    if not secs:
        yield
        return
    is_done = threading.Event()

    def watch() -> None:
        wait_secs = secs
        while not is_done.wait(wait_secs):
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
            wait_secs = AGAIN_SECS

    def stop(*_: object) -> None:
        if not is_done.is_set():
            raise LateError

    before = signal.signal(signal.SIGUSR1, stop)
    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_done.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
