"""Laws of zero bubbles fitted to times: no slower than others, and than any order of small ones."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction
from random import Random

import pytest

from superscaler_core.schedules import (
    Schedule,
    ScheduleError,
    one_f_one_b,
    timeline,
    zero_bubble,
    zero_bubble_fitted,
    zero_bubble_h2,
)
from superscaler_core.schedules.list_schedule import list_schedule
from superscaler_core.schedules.timeline import Durations

Times = tuple[tuple[int, int, int], ...]
"""F, I and W of every stage."""


def durations_of(times: Times) -> dict[tuple[str, int], int]:
    return {
        (kind, s): secs
        for s, own in enumerate(times)
        for kind, secs in zip("FIW", own, strict=True)
    }


def best_makespan(times: Times, num_microbatches: int, limit: int, bound: int) -> int:
    """The makespan of the best order of F, I and W, if it is below a bound; else the bound.

    A search of all orders, action by action in the order of their starts. Microbatches are alike,
    so those of one kind and stage run in order. Left out is what cannot be below the bound any
    more, and what is behind another state with the same actions in all of its times.
    """
    num, n = len(times), num_microbatches
    fronts: dict[tuple[tuple[int, ...], ...], list[tuple[int, ...]]] = {}
    best = bound

    def visit(
        counts: tuple[tuple[int, ...], ...],
        free: tuple[int, ...],
        sent: tuple[tuple[int, ...], ...],
        back: tuple[tuple[int, ...], ...],
        now: int,
    ) -> None:
        """``sent`` and ``back``: ends of F's and I's that the next stage has not taken."""
        nonlocal best
        lower = [
            at + sum((n - c) * secs for c, secs in zip(done, own, strict=True))
            for at, done, own in zip(free, counts, times, strict=True)
        ]
        if max(lower) >= best:
            return
        if all(done == (n, n, n) for done in counts):
            best = max(free)
            return
        state = (*free, *(t for ends in (*sent, *back) for t in ends), now)
        front = fronts.setdefault(counts, [])
        if any(all(a <= b for a, b in zip(old, state, strict=True)) for old in front):
            return
        front.append(state)
        moves = []
        for s, (f, i, w) in enumerate(counts):
            if f < n and f - w < limit and (s == 0 or sent[s - 1]):
                moves.append((max(free[s], sent[s - 1][0] if s else 0), 0, s))
            taken = sent[s] if s == num - 1 else back[s + 1]
            if i < f and taken:
                moves.append((max(free[s], taken[0]), 1, s))
            if w < i:
                moves.append((free[s], 2, s))
        for start, kind, s in sorted(moves, key=lambda move: (move[0], move[1] == 0, move[2])):
            if start < now:
                continue
            end = start + times[s][kind]
            queues = [list(sent), list(back)]
            if kind == 0 and s:
                queues[0][s - 1] = queues[0][s - 1][1:]
            if kind == 1:
                at = (0, s) if s == num - 1 else (1, s + 1)
                queues[at[0]][at[1]] = queues[at[0]][at[1]][1:]
            if kind == 0 or (kind == 1 and s):
                queues[kind][s] = (*queues[kind][s], end)
            done = [*counts[s]]
            done[kind] += 1
            visit(
                (*counts[:s], tuple(done), *counts[s + 1 :]),
                (*free[:s], end, *free[s + 1 :]),
                tuple(queues[0]),
                tuple(queues[1]),
                start,
            )

    empty = ((),) * num
    visit(((0, 0, 0),) * num, (0,) * num, empty, empty, 0)
    return best


def random_times(seed: int, num_stages: int, are_alike: bool) -> Times:
    rng = Random(seed)
    made = [tuple(rng.randint(1, 9) for _ in range(3)) for _ in range(num_stages)]
    return tuple(made[:1] * num_stages if are_alike else made)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("d, n", [(2, 3), (2, 8), (3, 3), (3, 4), (3, 5)])
def test_no_order_is_faster_where_stages_are_alike(d: int, n: int, seed: int) -> None:
    assert_is_best(d, n, d, seed, more=0)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("d, n, limit", [(3, 2, 3), (3, 3, 5), (3, 4, 4), (4, 3, 4)])
def test_few_microbatches_and_other_limits_are_near_the_best(
    d: int, n: int, limit: int, seed: int
) -> None:
    assert_is_best(d, n, limit, seed, more=Fraction(1, 20))


def assert_is_best(d: int, n: int, limit: int, seed: int, more: Fraction | int) -> None:
    """Up to ``more`` of the best makespan."""
    times = random_times(seed, d, are_alike=True)
    durations = durations_of(times)
    schedule = zero_bubble_fitted(d, n, durations, limit)
    found = timeline(schedule, durations).makespan
    assert isinstance(found, int)
    best = best_makespan(times, n, limit, found + 1)
    assert best <= found <= best * (1 + more)
    assert max(schedule.peak_microbatches) <= limit


def test_the_search_finds_what_is_faster() -> None:
    """Naive orders are slower than the best by what is known of them."""
    assert best_makespan(((1, 1, 1),) * 2, 4, 2, 99) == 13
    assert best_makespan(((1, 1, 1),) * 3, 5, 5, 99) == 3 * 5 + 2  # ZB-H2
    assert best_makespan(((2, 3, 1),), 4, 1, 99) == 24


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("d, n", [(2, 4), (4, 6), (5, 3)])
@pytest.mark.parametrize("are_alike", [True, False])
def test_fitted_is_never_slower_than_others_that_hold_no_more(
    d: int, n: int, seed: int, are_alike: bool
) -> None:
    durations: dict[str | tuple[str, int], int] = dict(
        durations_of(random_times(seed, d, are_alike))
    )
    durations |= {("B", s): durations["I", s] + durations["W", s] for s in range(d)}
    small, large = (zero_bubble_fitted(d, n, durations, limit) for limit in (0, 2 * d - 1))

    def secs(schedule: Schedule) -> int | Fraction:
        return timeline(schedule, durations).makespan

    assert secs(small) <= min(secs(one_f_one_b(d, n)), secs(zero_bubble(d, n)))
    assert secs(large) <= min(secs(small), secs(zero_bubble_h2(d, n)))
    assert max(small.peak_microbatches) <= d
    assert max(large.peak_microbatches) <= 2 * d - 1


EQUAL: Mapping[str, int] = {"F": 1, "I": 1, "W": 1}


@pytest.mark.parametrize(
    "d, n, limit, idle", [(4, 8, 7, 0), (4, 12, 7, 0), (8, 24, 15, 0), (4, 8, 4, 5)]
)
def test_list_scheduling_alone(d: int, n: int, limit: int, idle: int) -> None:
    """Without idle time by span with the memory of ZB-H2; with that of 1F1B it is not the best."""
    schedule = list_schedule("listed", range(d), n, EQUAL, limit)
    assert schedule is not None
    first = timeline(schedule).rows[0]
    assert first[-1].end - first[0].start - 3 * n == idle


@pytest.mark.parametrize("d, n", [(2, 4), (4, 8), (8, 16)])
def test_list_scheduling_of_a_v_ends_as_zb_v_does(d: int, n: int) -> None:
    schedule = list_schedule("listed", [*range(d), *reversed(range(d))], n, EQUAL, 2 * d)
    assert schedule is not None
    assert timeline(schedule).makespan == 6 * n + d - 1
    assert schedule.peak_microbatches == (2 * d,) * d


def test_a_limit_that_stops_all_workers_gives_no_schedule() -> None:
    assert list_schedule("listed", [0, 1, 1, 0], 4, EQUAL, 1) is None


@pytest.mark.parametrize(
    "durations, limit, words",
    [
        (EQUAL, 2, "zero-bubble-fitted of 3 stages: limit=2 microbatches; the first worker"),
        ({"F": 1, "I": 1}, 3, "duration of W at stage . is an int or a Fraction above 0"),
    ],
)
def test_what_cannot_be_fitted_is_refused(durations: Durations, limit: int, words: str) -> None:
    with pytest.raises(ScheduleError, match=words):
        zero_bubble_fitted(3, 4, durations, limit)
