"""Alarm: leave a block that takes too long, also if it waits for other processes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

AGAIN_SECS = 1.0
"""Seconds from one signal to the next: Python drops an exception that is raised in a finalizer."""


@dataclass(eq=False)
class Limit:
    """The time of a block, and whether it is over."""

    is_over: bool = False


class _OverError(Exception):
    """The time of a block is over."""


_limits: list[Limit] = []
"""Those of the blocks that are entered, the outermost first."""


@contextmanager
def move_on_after(secs: float, clock: Callable[[], float] = time.monotonic) -> Iterator[Limit]:
    """Leave the block, which is in the main thread, if it takes longer; blocks may be nested.

    Args:
        secs: how long the block may take; 0 for no limit.
        clock: gives the seconds so far. They pass no faster than those of a clock on the wall, if
            one thread computes.
    """
    limit = Limit()
    if not secs:
        yield limit
        return
    is_done, end = threading.Event(), clock() + secs

    def watch() -> None:
        wait_secs = secs
        while not is_done.wait(wait_secs):
            wait_secs = end - clock()
            if wait_secs <= 0:
                limit.is_over = True
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
                wait_secs = AGAIN_SECS

    def ring(*_: object) -> None:
        for each in _limits:
            if each.is_over:
                raise _OverError(each)

    watcher = threading.Thread(target=watch, daemon=True)
    before = signal.signal(signal.SIGUSR1, ring)
    try:
        _limits.append(limit)
        watcher.start()
        yield limit
    except _OverError as error:
        if error.args[0] is not limit:
            raise
    finally:
        # From here on a late signal is nobody's.
        _limits.remove(limit)
        is_done.set()
        watcher.join()
        signal.signal(signal.SIGUSR1, before)
