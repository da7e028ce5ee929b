"""Blocks that take too long are left, each for its own limit."""

import signal
import time

import pytest

from bench.cells.alarm import move_on_after


def test_a_block_in_time_is_not_left() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    for secs in (0, 5.0):
        with move_on_after(secs) as limit:
            found = secs
        assert (found, limit.is_over) == (secs, False)
    assert signal.getsignal(signal.SIGUSR1) == before


def test_a_block_that_waits_is_left() -> None:
    with move_on_after(0.05) as limit:
        time.sleep(30)
        raise AssertionError("was left before")
    assert limit.is_over


@pytest.mark.parametrize(("outer", "inner"), [(0.05, 30.0), (30.0, 0.05)])
def test_of_nested_blocks_that_is_left_whose_time_is_over(outer: float, inner: float) -> None:
    reached = []
    with move_on_after(outer) as first:
        with move_on_after(inner) as second:
            time.sleep(30)
            raise AssertionError("was left before")
        reached.append("the outer block")
    assert (first.is_over, second.is_over) == (outer < inner, inner < outer)
    assert reached == (["the outer block"] if inner < outer else [])


def test_errors_of_a_block_pass() -> None:
    with pytest.raises(KeyError), move_on_after(5.0):
        raise KeyError("x")


def test_by_processor_time_only_computing_counts() -> None:
    with move_on_after(0.2, time.process_time) as limit:
        time.sleep(0.5)
    assert not limit.is_over
    with move_on_after(0.05, time.process_time) as limit:
        while True:
            pass
    assert limit.is_over
