"""Hurried: planners that are interrupted when their time budget is used up."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from superscaler_core.evaluation import Candidate, Request, SearchPlanner

AGAIN_SECS = 1.0
"""Seconds from one alarm to the next, until the planner is interrupted."""


class _LateError(Exception):
    """The time budget is used up."""


def hurried(planner: SearchPlanner, budget_secs: float) -> SearchPlanner:
    """Wrap a planner so that it stops proposing after ``budget_secs`` of its own computation.

    A search looks at no further candidate after its budget, but it cannot interrupt a planner that
    computes for long before it proposes. The wrapper interrupts this computation with SIGALRM, so
    it works only in the main thread.

    Args:
        planner: the planner. If it returns a sequence, the sequence is returned unchanged.
        budget_secs: seconds of the planner's computation, over all its proposals together.
    """

    def propose(request: Request) -> Iterable[Candidate]:
        answer = planner(request)
        return answer if isinstance(answer, Sequence) else _within(iter(answer), budget_secs)

    return propose


def _within(answer: Iterator[Candidate], left_secs: float) -> Iterator[Candidate]:
    """The candidates that the planner proposes before the budget is used up."""
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
    """Raise ``_LateError`` in the block if it takes longer than ``secs``."""

    def ring(*_: object) -> None:
        raise _LateError

    before = signal.signal(signal.SIGALRM, ring)
    # It rings again: Python drops an exception that is raised while an object is finalized.
    signal.setitimer(signal.ITIMER_REAL, secs, AGAIN_SECS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
