"""Hurried: planners that think for no longer than their budget."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from superscaler_core.planners.search.request import Candidate, Request, SearchPlanner


class _LateError(Exception):
    """Time is up."""


def hurried(planner: SearchPlanner, budget_secs: float) -> SearchPlanner:
    """The planner, which proposes nothing more once it has thought for so long.

    A search begins no candidate after its budget, but cannot end a planner that thinks before it
    proposes. This ends it in the middle of a thought. In the main thread alone.

    Args:
        planner: whatever it answers; what is proposed at once is not changed.
        budget_secs: of thinking, all proposals together.
    """

    def propose(request: Request) -> Iterable[Candidate]:
        answer = planner(request)
        return answer if isinstance(answer, Sequence) else _within(iter(answer), budget_secs)

    return propose


def _within(answer: Iterator[Candidate], left_secs: float) -> Iterator[Candidate]:
    """The candidates that come in time."""
    while left_secs > 0:
        start = time.monotonic()
        try:
            with _alarm(left_secs):
                candidate = next(answer, None)
        except _LateError:
            return
        left_secs -= time.monotonic() - start
        if candidate is None:
            return
        yield candidate


@contextmanager
def _alarm(secs: float) -> Iterator[None]:
    """Raise after so many seconds, unless the block ends before."""

    def ring(*_: object) -> None:
        raise _LateError

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, secs)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
