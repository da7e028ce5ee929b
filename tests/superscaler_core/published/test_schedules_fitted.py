"""Laws of fitted zero bubble schedules: not slower than others, and optimal for small sizes."""

from __future__ import annotations

from fractions import Fraction
from itertools import cycle
from random import Random

import pytest

import superscaler_core as ss
from superscaler_core.published.tessel import exact_schedule, is_shortest, straight_routes, v_routes
from superscaler_core.published.tessel.fitted import zero_bubble_fitted
from superscaler_core.schedules import (
    Durations,
    one_f_one_b,
    timeline,
    zero_bubble,
    zero_bubble_h2,
    zero_bubble_v,
)
from tests.covering import covering

Times = tuple[tuple[int, int, int], ...]
"""F, I and W of every stage."""


def durations_of(times: Times) -> dict[str | tuple[str, int], int]:
    made: dict[str | tuple[str, int], int] = {}
    for stage, (f, i, w) in enumerate(times):
        made |= {("F", stage): f, ("I", stage): i, ("W", stage): w}
    return made


def random_times(seed: int, num_stages: int, are_alike: bool) -> Times:
    rng = Random(seed)
    made = [tuple(rng.randint(1, 4) for _ in range(3)) for _ in range(num_stages)]
    return tuple(made[:1] * num_stages if are_alike else made)


def secs(schedule: ss.Schedule, durations: Durations) -> int | Fraction:
    return timeline(schedule, durations).makespan


def best_secs(d: int, n: int, durations: Durations, limit: int) -> int | Fraction:
    """The least makespan, proved by integer programming."""
    return secs(exact_schedule(straight_routes(d), durations, n, limit), durations)


@pytest.mark.parametrize("seed, d, n", [(0, 2, 3), (1, 2, 8), (2, 3, 3), (3, 3, 4), (0, 4, 4)])
def test_fitted_schedule_of_equal_stages_is_the_shortest(d: int, n: int, seed: int) -> None:
    durations = durations_of(random_times(seed, d, are_alike=True))
    schedule = zero_bubble_fitted(d, n, durations)
    assert is_shortest(schedule, straight_routes(d), durations, d)
    assert max(schedule.peak_microbatches) <= d


ALIKE = [(1, 1, 1), (2, 2, 1), (2, 3, 1), (3, 2, 2), (1, 2, 3), (4, 1, 2)]
"""F, I and W."""


@pytest.mark.parametrize("times, size", [*zip(ALIKE, cycle([(3, 8), (4, 6), (4, 8)]))])
def test_zb_h1_is_the_fastest_with_its_memory_and_faster_than_1f1b(
    times: tuple[int, int, int], size: tuple[int, int]
) -> None:
    (d, n), durations = size, dict(zip("FIW", times, strict=True))
    whole = {"F": times[0], "B": times[1] + times[2]}
    fitted, h1 = zero_bubble_fitted(d, n, durations), zero_bubble(d, n)
    assert secs(h1, durations) == secs(fitted, durations) < secs(one_f_one_b(d, n), whole)
    assert is_shortest(h1, straight_routes(d), durations, d)


@pytest.mark.parametrize("n", [2, 3])
def test_zb_h1_is_not_the_shortest_with_few_microbatches(n: int) -> None:
    durations = dict(zip("FIW", (4, 1, 2), strict=True))
    assert not is_shortest(zero_bubble(4, n), straight_routes(4), durations, 4)
    fitted = zero_bubble_fitted(4, n, durations)
    assert is_shortest(fitted, straight_routes(4), durations, 4)


@pytest.mark.parametrize("times, size", [*zip(ALIKE, cycle([(3, 6), (4, 8)]))])
def test_zb_h2_is_the_fastest_with_its_memory(
    times: tuple[int, int, int], size: tuple[int, int]
) -> None:
    (d, n), durations = size, dict(zip("FIW", times, strict=True))
    assert is_shortest(zero_bubble_h2(d, n), straight_routes(d), durations, 2 * d - 1)


@pytest.mark.parametrize("d", [2, 3, 4])
def test_zb_v_is_the_fastest_where_f_i_and_w_are_equal(d: int) -> None:
    """It is the fastest with any memory, as it meets the lower bound."""
    assert is_shortest(zero_bubble_v(d, 8), v_routes(d), {"F": 1, "I": 1, "W": 1})


TIGHT = [(3, 4, 5, (8, 9, 9)), (4, 3, 4, (5, 4, 6))]
"""Stages, microbatches, limit and times.

For these cases, of 113 random ones, there is an order that is faster than the heuristic.
"""


@pytest.mark.parametrize("d, n, limit, times", TIGHT)
def test_search_finds_the_shortest_order_and_the_heuristic_is_near(
    d: int, n: int, limit: int, times: tuple[int, int, int]
) -> None:
    durations = dict(zip("FIW", times, strict=True))
    best = best_secs(d, n, durations, limit)
    quick, slow = (zero_bubble_fitted(d, n, durations, limit, search_secs=s) for s in (0, 60))
    assert best == secs(slow, durations) < secs(quick, durations) <= best * Fraction(21, 20)
    assert max(slow.peak_microbatches) <= limit


@covering(seed=range(2), size=[(2, 4), (4, 6)], are_alike=[True, False])
def test_fitted_schedule_is_not_slower_than_others_with_its_memory(
    seed: int, size: tuple[int, int], are_alike: bool
) -> None:
    d, n = size
    durations = durations_of(random_times(seed, d, are_alike))
    durations |= {("B", s): durations["I", s] + durations["W", s] for s in range(d)}
    small, large = (zero_bubble_fitted(d, n, durations, limit) for limit in (0, 2 * d - 1))
    others = [secs(made(d, n), durations) for made in (one_f_one_b, zero_bubble, zero_bubble_h2)]
    assert secs(small, durations) <= min(others[:2])
    assert secs(large, durations) <= min(others)
    assert max(small.peak_microbatches) <= d
    assert max(large.peak_microbatches) <= 2 * d - 1


@pytest.mark.parametrize(
    "durations, limit, words",
    [
        ({"F": 1, "I": 1, "W": 1}, 2,
         "zero-bubble-fitted of 3 stages: limit=2 microbatches; the first worker"),
        ({"F": 1, "I": 1}, 3, r"duration of W at stage . is an int or a Fraction above 0"),
    ],
)  # fmt: skip
def test_too_low_limit_or_missing_duration_is_rejected(
    durations: Durations, limit: int, words: str
) -> None:
    with pytest.raises(ss.ScheduleError, match=words):
        zero_bubble_fitted(3, 4, durations, limit)
