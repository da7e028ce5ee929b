"""Laws of hurried planners: what comes in time comes, and nothing is waited for."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from typing import Any

import pytest

from bench.cells.hurried import hurried
from superscaler_core.planners.search.request import Candidate

FIRST, SECOND = (Candidate(name, 1, lambda plan: None) for name in ("first", "second"))

NO_REQUEST: Any = None


def thinks(secs: float) -> Iterator[Candidate]:
    """Proposes one, thinks, and proposes another."""
    yield FIRST
    time.sleep(secs)
    yield SECOND


def test_a_planner_is_ended_in_the_middle_of_a_thought() -> None:
    start = time.monotonic()
    assert [*hurried(lambda _: thinks(600.0), 0.2)(NO_REQUEST)] == [FIRST]
    assert time.monotonic() - start < 60


def test_what_comes_in_time_is_proposed() -> None:
    assert [*hurried(lambda _: thinks(0.01), 60.0)(NO_REQUEST)] == [FIRST, SECOND]


def test_only_thinking_counts() -> None:
    proposed = iter(hurried(lambda _: thinks(0.01), 0.3)(NO_REQUEST))
    assert next(proposed) is FIRST
    time.sleep(0.5)
    assert next(proposed) is SECOND


def test_what_is_proposed_at_once_is_not_changed() -> None:
    answer = [FIRST, SECOND]
    assert hurried(lambda _: answer, 0.0)(NO_REQUEST) is answer


def test_faults_of_a_planner_are_raised() -> None:
    def at_fault(_: object) -> Iterator[Candidate]:
        yield FIRST
        raise ZeroDivisionError

    proposed = iter(hurried(at_fault, 60.0)(NO_REQUEST))
    assert next(proposed) is FIRST
    with pytest.raises(ZeroDivisionError):
        next(proposed)


def test_alarms_are_as_they_were() -> None:
    before = signal.getsignal(signal.SIGALRM)
    assert [*hurried(lambda _: thinks(600.0), 0.1)(NO_REQUEST)] == [FIRST]
    assert signal.getsignal(signal.SIGALRM) is before
    assert signal.getitimer(signal.ITIMER_REAL) == (0.0, 0.0)
