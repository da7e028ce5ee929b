"""Laws of the schedule generators: published figures, and all numbers of microbatches."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from itertools import product

import pytest

import superscaler_core as ss
from superscaler_core.published.chimera import chimera
from superscaler_core.schedules import (
    Action,
    gpipe,
    interlaced,
    interleaved,
    naive,
    one_f_one_b,
    timeline,
)
from tests.superscaler_core.schedule_rows import STRAIGHT, TWICE, own

# D stages, N microbatches, makespan if B = F and if B = 2F, idle share of it, peak of 1F1B.
CLASSIC = [
    (2, 4, 10, 15, Fraction(1, 5), (2, 1)),
    (4, 4, 14, 21, Fraction(3, 7), (4, 3, 2, 1)),
    (8, 32, 78, 117, Fraction(7, 39), (8, 7, 6, 5, 4, 3, 2, 1)),
]

# D workers, N microbatches, v chunks: makespan, busy, idle, its share, peak chunks; B = 2F.
INTERLEAVED = [
    (4, 8, 2, 57, 48, 9, Fraction(3, 19), (11, 9, 7, 5)),
    (4, 8, 4, 105, 96, 9, Fraction(3, 35), (19, 17, 15, 13)),
    (8, 16, 2, 117, 96, 21, Fraction(7, 39), (23, 21, 19, 17, 15, 13, 11, 9)),
    (4, 4, 2, 33, 24, 9, Fraction(3, 11), (8, 8, 7, 5)),
]


# D workers, N microbatches of Chimera: makespan and idle share if B = F, and if B = 2F, peak.
CHIMERA = [
    (2, 2, 4, Fraction(0), 6, Fraction(0), (2, 2)),
    (4, 4, 10, Fraction(1, 5), 16, Fraction(1, 4), (3, 4, 4, 3)),
    (4, 8, 18, Fraction(1, 9), 30, Fraction(1, 5), (3, 4, 4, 3)),
    (6, 6, 16, Fraction(1, 4), 26, Fraction(4, 13), (4, 5, 6, 6, 5, 4)),
    (8, 8, 22, Fraction(3, 11), 36, Fraction(1, 3), (5, 6, 7, 8, 8, 7, 6, 5)),
    (8, 16, 38, Fraction(3, 19), 66, Fraction(3, 11), (5, 6, 7, 8, 8, 7, 6, 5)),
]


@pytest.mark.parametrize("d, n, equal, idle, twice, idle_twice, peak", CHIMERA)
def test_makespan_bubble_and_peak_of_chimera(
    d: int,
    n: int,
    equal: int,
    idle: Fraction,
    twice: int,
    idle_twice: Fraction,
    peak: tuple[int, ...],
) -> None:
    """The figures are those of the authors' generator, which was not run for D = 2."""
    schedule = chimera(d, n)
    both = timeline(schedule), timeline(schedule, TWICE)
    assert [times.makespan for times in both] == [equal, twice]
    assert [times.bubble_of_makespan for times in both] == [idle, idle_twice]
    assert schedule.peak_microbatches == peak


@pytest.mark.parametrize("d, n", [(2, 2), (4, 8), (6, 6), (8, 48), (10, 30), (12, 12)])
def test_bubble_and_peak_of_chimera_equal_their_closed_forms(d: int, n: int) -> None:
    schedule = chimera(d, n)
    assert timeline(schedule).bubble_of_makespan == Fraction(d - 2, 2 * n + d - 2)
    if n == d:
        twice = timeline(schedule, TWICE).bubble_of_makespan
        assert twice == Fraction(d - 2) / (Fraction(3 * n, 2) + d - 2)
    ends = d // 2 + 1
    assert (min(schedule.peak_microbatches), max(schedule.peak_microbatches)) == (ends, max(d, 2))


def test_schedules_in_one_direction_have_one_route() -> None:
    assert one_f_one_b(3, 4).routes == (((0,), (1,), (2,)),)
    assert interlaced(2, 3).routes == (((0, 1), (0,), (0, 1), (1,)),)


@pytest.mark.parametrize("generator", [gpipe, one_f_one_b])
@pytest.mark.parametrize("d, n, equal, twice, bubble, peak", CLASSIC)
def test_makespan_and_bubble_of_gpipe_and_1f1b(
    generator: Callable[[int, int], ss.Schedule],
    d: int,
    n: int,
    equal: int,
    twice: int,
    bubble: Fraction,
    peak: tuple[int, ...],
) -> None:
    schedule = generator(d, n)
    assert (timeline(schedule).makespan, timeline(schedule, TWICE).makespan) == (equal, twice)
    assert timeline(schedule).bubble_of_makespan == bubble
    assert timeline(schedule, TWICE).bubble_of_makespan == bubble


@pytest.mark.parametrize("d, n, equal, twice, bubble, peak", CLASSIC)
def test_peak_microbatches_of_gpipe_and_1f1b(
    d: int, n: int, equal: int, twice: int, bubble: Fraction, peak: tuple[int, ...]
) -> None:
    assert gpipe(d, n).peak_microbatches == (n,) * d
    assert one_f_one_b(d, n).peak_microbatches == peak
    assert timeline(one_f_one_b(d, n)).peak_microbatches == peak


@pytest.mark.parametrize("d, n, v, makespan, busy, idle, bubble, peak", INTERLEAVED)
def test_makespan_bubble_and_peak_of_interleaved(
    d: int,
    n: int,
    v: int,
    makespan: int,
    busy: int,
    idle: int,
    bubble: Fraction,
    peak: tuple[int, ...],
) -> None:
    times = timeline(interleaved(d, n, v), TWICE)
    assert times.makespan == makespan
    assert times.busy == (busy,) * d
    assert times.idle == (idle,) * d
    assert times.bubble_of_makespan == bubble == Fraction(d - 1, v * n + d - 1)
    assert times.peak_microbatches == peak


@pytest.mark.parametrize("d, n", [(1, 1), (1, 8), (2, 3), (4, 1), (4, 8), (7, 3)])
def test_naive_leaves_all_workers_but_one_idle(d: int, n: int) -> None:
    times = timeline(naive(d, n), TWICE)
    assert times.bubble_of_makespan == Fraction(d - 1, d)
    assert times.makespan == 3 * d * n
    assert times.peak_microbatches == (1,) * d


@pytest.mark.parametrize(
    "d, n", [(8, 1), (3, 3), *((d, n) for d in range(1, 9) for n in (1 + 5 * d % 12, d + 4))]
)
def test_1f1b_equals_the_closed_rule_of_nnscaler(d: int, n: int) -> None:
    """nnScaler's closed rule: at step t >= s, stage s runs F if t - s is even, else B."""
    num_steps = 2 * n + 2 * (d - 1)
    rows: list[list[Action]] = [[] for _ in range(d)]
    for step, stage in product(range(num_steps), range(d)):
        kind = "FB"[(step - stage) % 2]
        microbatch = (step - stage) // 2 - (d - 1 - stage if kind == "B" else 0)
        if step >= stage and 0 <= microbatch < n:
            rows[stage].append(Action(kind, stage, microbatch))
    assert one_f_one_b(d, n).rows == tuple(map(tuple, rows))
    assert timeline(one_f_one_b(d, n)).makespan == num_steps


def test_each_bubble_follows_its_definition() -> None:
    """Workers are busy for 4 and 2 of 6. Worker 1 starts late and ends early, with a span of 4."""
    times = timeline(own("0F0 2F0 2B0 0B0", "1F0 1B0", stages=3, microbatches=1))
    assert (times.makespan, times.busy, times.idle) == (6, (4, 2), (2, 4))
    assert times.bubble_of_makespan == Fraction(6, 12)
    assert times.bubble_of_ideal == Fraction(6, 6)
    assert times.bubble_of_span == Fraction(2, 6)


# Any number of microbatches


@pytest.mark.parametrize("name", STRAIGHT)
@pytest.mark.parametrize("d, n", [(2, 1), (4, 3), (7, 1), (8, 5)])
def test_schedules_run_with_fewer_microbatches_than_stages(name: str, d: int, n: int) -> None:
    schedule = ss.SCHEDULES[name](d, n)
    num_recycling_passes = n * d if name == "naive" else n + d - 1
    assert timeline(schedule, TWICE).makespan == 3 * num_recycling_passes
    assert {action for row in schedule.rows for action in row} == {
        Action(kind, stage, m) for kind in "FB" for stage in range(d) for m in range(n)
    }


@pytest.mark.parametrize(
    "d, n, v",
    [*((1 + 3 * n % 7, n, 2 + n % 2) for n in range(1, 16)), *product((5, 6, 7), (1, 4), (2, 3))],
)
def test_makespan_of_interleaved_equals_the_lower_bound(d: int, n: int, v: int) -> None:
    """Two lower bounds: the fill plus a worker's work, or one microbatch's path plus the others."""
    floor = max(v * n + d - 1, v * d + n - 1)
    assert timeline(interleaved(d, n, v)).makespan == 2 * floor
    assert timeline(interleaved(d, n, v), TWICE).makespan == 3 * floor


@pytest.mark.parametrize("d, n", [(d, n) for d in range(1, 7) for n in (9 - d, 1 + d % 3)])
def test_interleaved_with_one_chunk_is_1f1b(d: int, n: int) -> None:
    assert interleaved(d, n, 1).rows == one_f_one_b(d, n).rows
