"""Hurried: planners that are interrupted when their time budget is used up."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from bench.cells.alarm import move_on_after
from superscaler_core.evaluation import Candidate, Request, SearchPlanner


def hurried(
    planner: SearchPlanner, budget_secs: float, clock: Callable[[], float] = time.monotonic
) -> SearchPlanner:
    """Wrap a planner so that it stops proposing after ``budget_secs`` of its own computation.

    A search looks at no further candidate after its budget, but it cannot interrupt a planner that
    computes for long before it proposes. The wrapper interrupts this computation by a signal, so it
    works only in the main thread.

    Args:
        planner: the planner. If it returns a sequence, the sequence is returned unchanged.
        budget_secs: seconds of the planner's computation, over all its proposals together.
        clock: gives the seconds so far.
    """

    def propose(request: Request) -> Iterable[Candidate]:
        answer = planner(request)
        return answer if isinstance(answer, Sequence) else _within(iter(answer), budget_secs, clock)

    return propose


def _within(
    answer: Iterator[Candidate], left_secs: float, clock: Callable[[], float]
) -> Iterator[Candidate]:
    """The candidates that the planner proposes before the budget is used up."""
    while left_secs > 0:
        start, candidate = clock(), None
        with move_on_after(left_secs, clock):
            candidate = next(answer, None)
        left_secs -= clock() - start
        if candidate is None:
            return
        yield candidate
