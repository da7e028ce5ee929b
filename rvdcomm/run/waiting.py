"""Waiting: how long calls wait for other ranks, if a caller sets another limit than the group's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import timedelta
from math import ceil

from rvdcomm.errors import LayoutError

_LONGEST_SECS = 1_000_000_000
"""Longest limit in seconds. A 64-bit count of nanoseconds overflows after 9 times as long."""

_LIMIT: ContextVar[timedelta | None] = ContextVar("rvdcomm_timeout", default=None)


@contextmanager
def timeout(secs: float) -> Iterator[None]:
    """Let every call that begins in this block wait at most ``secs`` for any other rank.

    Elsewhere calls wait for the timeout of their process group. A call in the background
    (``async_op=True``) keeps the limit of the block in which it began. A rank that waits in vain
    raises ``CommError``, and breaks its group as after any other failure (docs/executors.md). With
    NCCL the limit holds for agreements and for shared memory; messages have the group's timeout.

    >>> with timeout(5.0):
    ...     of_block()
    datetime.timedelta(seconds=5)

    Args:
        secs: seconds, above 0 and at most 1e9; rounded up to whole milliseconds. Ranks may give
            different limits.

    Raises:
        LayoutError: ``secs`` is not a number in this range.
    """
    if not isinstance(secs, int | float) or not 0 < secs <= _LONGEST_SECS:
        raise LayoutError(
            f"timeout: a number of seconds above 0, at most {_LONGEST_SECS:,}, got {secs!r}."
        )
    # Backends count whole milliseconds, and take 0 of them as no limit.
    before = _LIMIT.set(timedelta(milliseconds=ceil(secs * 1000)))
    try:
        yield
    finally:
        _LIMIT.reset(before)


def of_block() -> timedelta | None:
    """The limit of the innermost block around this call; None outside of all of them."""
    return _LIMIT.get()
