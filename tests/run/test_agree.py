"""Laws of agreement: errors name the ranks that differ and the field in which they differ."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import product
from threading import Thread
from typing import Any

import pytest
from torch.distributed import DistNetworkError, DistStoreError, HashStore

import rvdcomm as rv
from rvdcomm.run.agree import check_equal, exchange_posts, part
from rvdcomm.text import MAX_QUOTED


@pytest.mark.parametrize(
    "theirs, said",
    [
        ({"dst": "R2", "limit": 8}, "dst: rank 0 asks for R1, rank 3 for R2."),
        ({"dst": "R1", "limit": None}, "limit: rank 0 asks for 8, rank 3 for None."),
        ({"dst": "R1"}, "limit: rank 0 asks for 8, rank 3 for None."),
        ({"dst": "R1", "limit": 8, "more": 1}, "more: rank 0 asks for None, rank 3 for 1."),
    ],
    ids=["a text", "a value", "one less", "one more"],
)
def test_error_names_the_first_field_that_differs(theirs: dict[str, Any], said: str) -> None:
    mine = {"dst": "R1", "limit": 8}
    with pytest.raises(rv.LayoutError) as error:
        check_equal({1: mine, 3: theirs, 0: mine}, "call")
    assert str(error.value) == f"call: ranks disagree about {said}"


def test_long_values_are_shortened_in_the_error() -> None:
    with pytest.raises(rv.LayoutError) as error:
        check_equal({0: {"ranks": list(range(10**5))}, 1: {"ranks": []}}, "call")
    assert len(str(error.value)) < 2 * MAX_QUOTED


@dataclass
class PairOfRanks:
    """Rank 0 of a pair of ranks; rank 1 gives up, after or before it has posted."""

    posts_first: bool
    prefix: str = "pair"
    rank: int = 0
    timeout: timedelta = timedelta(seconds=5)
    store: Any = field(default_factory=HashStore)
    generations: dict[tuple[int, ...], str] = field(default_factory=lambda: {(0, 1): "first"})
    num_agreements: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_partings: dict[tuple[int, ...], int] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)
    failed_with: list[BaseException] = field(default_factory=list)

    def check(self) -> None:
        pass

    def fail(self, error: BaseException) -> None:
        self.failed_with.append(error)

    def gone(self, ranks: Iterable[int]) -> set[int]:
        return {*ranks} & self.dead

    def watch(self, members: tuple[int, ...], what: str, is_done: Callable[[], bool]) -> None:
        if self.posts_first:
            self.store.set("first/0/1", json.dumps({"bytes": 2}))
        raise rv.CommError("rank 1 gave up")


def test_posts_are_used_if_a_rank_gives_up_after_it_posted() -> None:
    pair = PairOfRanks(posts_first=True)
    assert exchange_posts(pair, (0, 1), {"bytes": 1}, "call") == {0: {"bytes": 1}, 1: {"bytes": 2}}
    assert not pair.failed_with


def test_a_rank_that_gives_up_before_it_posts_is_an_error() -> None:
    pair = PairOfRanks(posts_first=False)
    with pytest.raises(rv.CommError, match="rank 1 gave up"):
        exchange_posts(pair, (0, 1), {"bytes": 1}, "call")
    assert len(pair.failed_with) == 1


class LateRank(PairOfRanks):
    """Rank 1 posts after rank 0 has waited for longer than the timeout of the group."""

    def watch(self, members: tuple[int, ...], what: str, is_done: Callable[[], bool]) -> None:
        self.began = getattr(self, "began", time.monotonic())
        if time.monotonic() - self.began > 0.3:
            self.store.set("first/0/1", json.dumps({"bytes": 2}))


def late_rank() -> LateRank:
    return LateRank(posts_first=False, timeout=timedelta(seconds=0.2))


def test_a_rank_that_posts_after_the_timeout_is_named() -> None:
    with pytest.raises(rv.CommError, match=r"ranks \[1\] did not join within 0.2 s"):
        exchange_posts(late_rank(), (0, 1), {"bytes": 1}, "call")


def test_an_agreement_may_wait_for_several_timeouts() -> None:
    posts = exchange_posts(late_rank(), (0, 1), {"bytes": 1}, "call", num_timeouts=50)
    assert posts == {0: {"bytes": 1}, 1: {"bytes": 2}}


# --- stores that fail ---------------------------------------------------------------------------


class BrokenStore:
    """A store whose every operation raises."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def check(self, *_: object) -> bool:
        raise self._error

    set = check


STACK = "\nException raised from recvBytes at Utils.hpp:1 (most recent call first):\nframe #0: f"


@pytest.mark.parametrize(
    "error, said, breaks",
    [
        (RuntimeError("can't start new thread"), "RuntimeError: can't start new thread.", True),
        (OSError(24, "Too many open files"), "OSError: [Errno 24] Too many open files.", True),
        (MemoryError(), "MemoryError: MemoryError.", True),
        (DistStoreError("No space?"), "rank 0: DistStoreError: No space?", True),
        (DistNetworkError(f"Broken pipe{STACK}"), "is lost: Broken pipe. Calls that all", False),
    ],
    ids=["threads", "descriptors", "memory", "store", "connection"],
)
def test_what_happened_to_an_agreement_is_told(error: Exception, said: str, breaks: bool) -> None:
    pair = PairOfRanks(posts_first=True, store=BrokenStore(error))
    with pytest.raises(rv.CommError) as caught:
        exchange_posts(pair, (0, 1), {"bytes": 1}, "call")
    assert type(caught.value) is rv.CommError
    assert said in str(caught.value)
    assert "frame" not in str(caught.value)
    assert bool(pair.failed_with) == breaks


def test_the_dead_are_named_if_the_store_is_lost_with_them() -> None:
    pair = PairOfRanks(posts_first=True, store=BrokenStore(DistNetworkError("gone")), dead={1})
    with pytest.raises(rv.CommError, match=r"call, rank 0: rank 1 is gone \(its process ended"):
        exchange_posts(pair, (0, 1), {"bytes": 1}, "call")


# --- parting ------------------------------------------------------------------------------------


def threads_that_part(num_ranks: int, last: int, store: HashStore) -> list[int]:
    """The order in which ranks, threads here, have parted; ``last`` comes after all others."""
    members, order = tuple(range(num_ranks)), []

    def run(rank: int) -> None:
        if rank == last:
            time.sleep(0.1)
            order.append(-1)
        of_rank = PairOfRanks(True, rank=rank, store=store, generations={members: "first"})
        part(of_rank, members)
        part(of_rank, members)
        order.append(rank)

    threads = [Thread(target=run, args=(rank,)) for rank in members]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return order


@pytest.mark.parametrize("last", [0, 2])
def test_no_rank_parts_before_all_have_come(last: int) -> None:
    store = HashStore()
    order = threads_that_part(3, last, store)
    assert order[0] == -1
    # Of two partings, the keys of the first are gone.
    assert store.num_keys() == 2 * 3


class LateStore:
    """A store in which the keys of all members come right after the first look at them."""

    def __init__(self) -> None:
        self.store, self.num_looks = HashStore(), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def check(self, keys: list[str]) -> bool:
        self.num_looks += len(keys) > 1
        return self.store.check(keys) and (len(keys) == 1 or self.num_looks > 1)


def test_a_rank_that_comes_between_two_looks_is_not_taken_for_a_dead_one() -> None:
    pair = PairOfRanks(True, store=LateStore())
    for word, number in product(("ready", "parts"), (0, 1)):
        pair.store.set(f"first/{word}/{number}/1", "")
    part(pair, (0, 1))
    pair.store.num_looks = 0
    part(pair, (0, 1))
    assert not pair.store.check(["first/parts/0/1"])


def test_nobody_waits_for_the_dead_nor_after_a_failure() -> None:
    part(PairOfRanks(True, dead={1}, timeout=timedelta(hours=1)), (0, 1))
    failed = PairOfRanks(True, timeout=timedelta(hours=1))
    failed.store.set("first/failed", "a reason")
    part(failed, (0, 1))


def test_parting_without_a_store_raises_nothing() -> None:
    part(PairOfRanks(True, store=BrokenStore(DistNetworkError("gone"))), (0, 1))
