"""Laws of hurried planners: they propose within a time budget, and are interrupted after it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.cells.hurried import hurried
from superscaler_core.evaluation import Candidate

FIRST, SECOND = (Candidate(name, 1, lambda plan: None) for name in ("first", "second"))

NO_REQUEST: Any = None


def thinks(secs: float) -> Iterator[Candidate]:
    """Propose a candidate, compute for ``secs``, and propose another candidate."""
    yield FIRST
    time.sleep(secs)
    yield SECOND


def test_planner_is_interrupted_when_its_time_budget_is_used_up() -> None:
    start = time.monotonic()
    assert [*hurried(lambda _: thinks(600.0), 0.2)(NO_REQUEST)] == [FIRST]
    assert time.monotonic() - start < 60


class Lingering:
    """An object whose finalizer takes long; Python drops exceptions that are raised in it."""

    def __del__(self) -> None:
        time.sleep(0.5)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_planner_is_interrupted_later_if_it_finalizes_an_object_when_its_time_is_up() -> None:
    def finalizes(_: object) -> Iterator[Candidate]:
        yield FIRST
        Lingering()
        time.sleep(600.0)
        yield SECOND

    start = time.monotonic()
    assert [*hurried(finalizes, 0.2)(NO_REQUEST)] == [FIRST]
    assert time.monotonic() - start < 60


def test_candidates_within_the_time_budget_are_proposed() -> None:
    assert [*hurried(lambda _: thinks(0.01), 60.0)(NO_REQUEST)] == [FIRST, SECOND]


def test_time_of_the_consumer_does_not_count_against_the_budget() -> None:
    proposed = iter(hurried(lambda _: thinks(0.01), 0.3)(NO_REQUEST))
    assert next(proposed) is FIRST
    time.sleep(0.5)
    assert next(proposed) is SECOND


def test_previous_handler_is_restored() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    assert [*hurried(lambda _: thinks(600.0), 0.1)(NO_REQUEST)] == [FIRST]
    assert signal.getsignal(signal.SIGUSR1) is before
