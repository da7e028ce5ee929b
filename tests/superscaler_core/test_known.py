"""Known: a bounded cache that threads share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from superscaler_core.known import Known

NUM_THREADS = 4


def test_the_oldest_entry_is_dropped() -> None:
    known: Known[int, int] = Known(2)
    for number in range(3):
        assert known.of(number, lambda number=number: number * 10) == number * 10  # type: ignore[misc]
    assert dict(known) == {1: 10, 2: 20}


def test_a_known_result_is_not_made_again() -> None:
    known: Known[str, object] = Known(2)
    first = known.of("key", object)
    assert known.of("key", object) is first


def test_threads_that_make_a_result_at_once_share_one() -> None:
    known: Known[str, object] = Known(2)
    all_are_here = Barrier(NUM_THREADS, timeout=60)

    def make() -> object:
        all_are_here.wait()
        return object()

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        found = list(pool.map(lambda _: known.of("key", make), range(NUM_THREADS)))
    assert len(set(map(id, found))) == 1


def test_threads_may_fill_and_read_it_at_once() -> None:
    known: Known[int, int] = Known(3)

    def fill(first: int) -> bool:
        numbers = [(first + step) % 50 for step in range(2000)]
        return all(known.of(number, lambda number=number: number) == number for number in numbers)  # type: ignore[misc]

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert all(pool.map(fill, range(NUM_THREADS)))
    assert len(known) == 3
