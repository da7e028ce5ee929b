"""Collector: Python's collector of cycles pauses while much is made that stays."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Nothing is collected inside, for the whole process; then all is as it was.

    A compiled plan is millions of small objects, none of which is garbage: the collector would go
    through all of them again and again as they come to be, which takes nearly as long as the rest.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
