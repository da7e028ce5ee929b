"""Collector: pauses Python's garbage collector while many long-lived objects are created."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["paused_collector"]


@contextmanager
def paused_collector() -> Iterator[None]:
    """Pause garbage collection in the whole process, and restore its state at the end.

    A compiled plan consists of millions of small objects, none of which is garbage. The collector
    would scan them repeatedly while they are created, which takes nearly as long as creating them.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
