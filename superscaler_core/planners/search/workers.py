"""Workers: processes that look at candidates side by side, or this process alone."""

from __future__ import annotations

import multiprocessing
import pickle
import signal
from collections import deque
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any

from superscaler_core.planners.search.evaluate import Looked, evaluate, look, trial_of
from superscaler_core.planners.search.request import Candidate, Look, Request, Trial


class Workers:
    """Looks at candidates of one request; a context.

    A candidate that cannot be sent to another process is looked at here, and so is every one if the
    system ends a process, for its memory perhaps.

    Args:
        request: of all candidates.
        num_processes: with one, all is done here, one after another.
    """

    def __init__(self, request: Request, num_processes: int) -> None:
        self._request = request
        self._here: deque[tuple[Candidate, Look]] = deque()
        self._away: dict[Future[Looked], tuple[Candidate, Look]] = {}
        self._num = num_processes if _can_send(request) else 1
        self._pool: ProcessPoolExecutor | None = None
        if self._num > 1:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self._num, context, _start, (request,))

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def has_room(self) -> bool:
        """Whether another candidate would be begun at once."""
        return len(self._here) + len(self._away) < (self._num if self._pool else 1)

    def begin(self, candidate: Candidate, how: Look) -> None:
        """Look at a candidate when there is room."""
        if self._pool is None or not _can_send((candidate.sprogram, how)):
            self._here.append((candidate, how))
            return
        future = self._pool.submit(_look, candidate.samples, candidate.sprogram, how)
        self._away[future] = candidate, how

    def wait(self, timeout_secs: float) -> Trial | None:
        """The next that ends; None if none is under way, or none ends in time."""
        if self._here:
            return evaluate(self._request, *self._here.popleft())
        if not self._away:
            return None
        ended, _ = wait(self._away, max(0.0, timeout_secs), FIRST_COMPLETED)
        if not ended:
            return None
        future = ended.pop()
        candidate, how = self._away.pop(future)
        try:
            return trial_of(candidate, future.result())
        except BrokenProcessPool:
            self._pool = None
            self._here.extend([(candidate, how), *self._away.values()])
            self._away.clear()
            return self.wait(timeout_secs)


def _can_send(value: object) -> bool:
    try:
        pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError):
        return False
    return True


_mine: list[Request] = []
"""The request of a process of a pool."""


def _start(request: Request) -> None:
    # Ctrl-C is for the process that searches.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _mine[:] = [request]


def _look(samples: int, sprogram: Callable[..., Any], how: Look) -> Looked:
    return look(_mine[0], samples, sprogram, how)
