"""Laws of workers: every candidate is evaluated, and no process outlives a search."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

import superscaler_core as ss
from superscaler_core import Plan
from superscaler_core.evaluation.evaluate import evaluate
from superscaler_core.evaluation.microbatches import Captured
from superscaler_core.evaluation.request import FULL, Candidate
from superscaler_core.evaluation.workers import Workers
from superscaler_core.plans import PLANS
from tests.superscaler_core.planners.test_search import request


def is_away() -> bool:
    return multiprocessing.parent_process() is not None


def dies_when_away(plan: Plan) -> None:
    if is_away():
        os._exit(1)
    PLANS["data_parallel"](plan)


def sleeps_when_away(plan: Plan) -> None:
    if is_away():
        time.sleep(600)


def is_at_fault(plan: Plan) -> None:
    raise ZeroDivisionError("of this package")


def fails(samples: int) -> ss.Graph:
    raise ss.CaptureError(f"{samples} samples")


def candidate(fill: Callable[[Plan], None]) -> Candidate:
    return Candidate("one", 4, fill)


@pytest.fixture
def workers() -> Iterator[Workers]:
    with Workers(request(), 2) as found:
        yield found
    assert not multiprocessing.active_children()


def test_worker_returns_the_same_trial_as_this_process(workers: Workers) -> None:
    asked = candidate(PLANS["data_parallel"])
    workers.begin(asked, FULL)
    here, away = evaluate(request(), asked), workers.wait(60)
    assert away is not None
    assert (away.candidate, away.secs, away.peak_bytes) == (asked, here.secs, here.peak_bytes)


def test_candidate_of_a_dead_worker_is_evaluated_in_this_process(workers: Workers) -> None:
    workers.begin(candidate(dies_when_away), FULL)
    found = workers.wait(60)
    assert found is not None
    assert found.fits
    # One worker is left, so one candidate occupies all workers.
    workers.begin(candidate(PLANS["data_parallel"]), FULL)
    assert not workers.has_room


def test_candidate_that_cannot_be_pickled_is_evaluated_in_this_process(workers: Workers) -> None:
    seen = []
    workers.begin(candidate(lambda plan: seen.append(is_away())), FULL)
    workers.wait(60)
    assert seen == [False]
    # The fixture ends the worker, and fails if the process is still alive.


def test_abandoned_looks_end_with_their_workers(workers: Workers) -> None:
    workers.begin(candidate(sleeps_when_away), FULL)
    workers.abandon()
    assert workers.wait(0.1) is None
    workers.begin(candidate(PLANS["data_parallel"]), FULL)
    found = workers.wait(60)  # by the worker that was idle
    assert found is not None
    assert found.fits


def test_worker_goes_on_if_the_model_cannot_be_captured() -> None:
    asked = replace(request(), captured=Captured(fails, (2,)))
    with Workers(asked, 2) as workers:
        workers.begin(candidate(PLANS["data_parallel"]), FULL)
        found = workers.wait(60)
        assert found is not None
        assert found.fits
        assert len(multiprocessing.active_children()) == 2


def test_unexpected_exception_in_a_worker_is_raised_with_its_traceback(workers: Workers) -> None:
    workers.begin(candidate(is_at_fault), FULL)
    with pytest.raises(ZeroDivisionError, match="of this package") as raised:
        workers.wait(60)
    assert "in is_at_fault" in raised.value.__notes__[0]
