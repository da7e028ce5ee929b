"""Known: a bounded cache that threads share."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

from superscaler_core.known import ByKey, Known, remembers

NUM_THREADS = 4


def test_the_oldest_entry_is_dropped() -> None:
    known: Known[int, int] = Known(2)
    for number in range(3):
        assert known.of(number, lambda number=number: number * 10) == number * 10  # type: ignore[misc]
    assert dict(known) == {1: 10, 2: 20}


class Doubles:
    """Counts how often a result is computed."""

    def __init__(self) -> None:
        self.num_computed = 0

    @remembers(2)
    def of(self, number: ByKey[int]) -> int:
        self.num_computed += 1
        return 2 * number.value


def test_a_method_remembers_its_last_results_for_each_object_by_their_keys() -> None:
    first, second = Doubles(), Doubles()
    assert [first.of(ByKey("a", 1)), first.of(ByKey("a", 5)), second.of(ByKey("a", 5))] == [
        2,
        2,
        10,
    ]
    for key in "bca":
        first.of(ByKey(key, 1))
    assert (first.num_computed, second.num_computed) == (4, 1)


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
