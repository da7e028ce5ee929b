"""Laws of the exact search: comparison with brute force and with named schedules."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, cycle, product

import pytest

import superscaler_core as ss
from superscaler_core.published.chimera import chimera
from superscaler_core.published.tessel import (
    both_ways,
    exact_schedule,
    looped_routes,
    straight_routes,
    v_routes,
)
from superscaler_core.schedules import (
    EQUAL,
    Action,
    ActionKind,
    Durations,
    Time,
    WorkerRoute,
    held_by,
    interleaved,
    one_f_one_b,
    timeline,
)
from tests.superscaler_core.schedule_rows import TWICE

HALVES: Durations = {"F": 1, "I": 1, "W": 1}

SHARED = (((0, 1), (0,), (1,)),)
"""Both workers run the first stage together."""

TWO_ENCODERS = (((0,), (1,), (2,)),), ((0, 2), (1, 2))
"""Routes and edges: stage 2 reads stages 0 and 1."""


def merged(chains: Sequence[tuple[Action, ...]]) -> Iterator[tuple[Action, ...]]:
    """All interleavings of several chains of actions; the order within a chain is kept."""
    if not any(chains):
        yield ()
    for i, chain in enumerate(chains):
        if chain:
            rest = merged([*chains[:i], chain[1:], *chains[i + 1 :]])
            yield from ((chain[0], *others) for others in rest)


def peak(row: tuple[Action, ...]) -> int:
    """The largest number of microbatches that a worker holds, by definition."""
    return max(accumulate(held_by(action, False) for action in row))


def brute_force(
    routes: Sequence[WorkerRoute],
    durations: Durations,
    num_microbatches: int,
    limit: int | None,
    edges: tuple[tuple[int, int], ...] | None = None,
) -> Time:
    """The least makespan of all orders of actions, with microbatches in any order.

    A worker runs the forwards of a microbatch in the order of stages, and then its backwards in
    the reverse order; with halves, it has a single stage.
    """
    stages = range(len(routes[0]))
    num_workers = 1 + max(w for route in routes for team in route for w in team)
    halves = any(key[0] == "I" for key in durations)
    rows = []
    for worker in range(num_workers):
        chains = []
        for m in range(num_microbatches):
            own = [s for s in stages if worker in routes[m % len(routes)][s]]
            back = [(kind, s) for s in reversed(own) for kind in ("IW" if halves else "B")]
            chain = [*(("F", s) for s in own), *back]
            chains.append(tuple(Action(ActionKind(kind), s, m) for kind, s in chain))
        rows.append([row for row in merged(chains) if limit is None or peak(row) <= limit])
    makespans = []
    for chosen in product(*rows):
        schedule = ss.Schedule("brute", len(stages), num_microbatches, chosen)
        with suppress(ss.ScheduleError):  # It cannot run.
            makespans.append(timeline(schedule, durations, edges).makespan)
    return min(makespans)


SMALL = [
    *((straight_routes(2), "FB", n, limit, None) for n, limit in ((2, 1), (2, 2), (3, 2))),
    (straight_routes(3), "FB", 2, 1, None),
    (straight_routes(2), "FIW", 2, 1, None),
    (straight_routes(2), "FIW", 2, None, None),
    (looped_routes(2, 2), "FB", 2, 3, None),
    (v_routes(2), "FB", 2, 3, None),
    (both_ways(2), "FB", 3, 1, None),
    (SHARED, "FB", 2, 2, None),
    (TWO_ENCODERS[0], "FB", 2, 2, TWO_ENCODERS[1]),
]


@pytest.mark.parametrize(
    "routes, kinds, num_microbatches, limit, edges, seed",
    [(*case, seed) for case, seed in zip(SMALL, cycle(range(2)))],
)
def test_exact_search_equals_brute_force(
    routes: tuple[WorkerRoute, ...],
    kinds: str,
    num_microbatches: int,
    limit: int | None,
    edges: tuple[tuple[int, int], ...] | None,
    seed: int,
) -> None:
    generator = random.Random(seed)
    stages = range(len(routes[0]))
    durations: Durations = {(kind, s): generator.randint(1, 4) for kind in kinds for s in stages}
    found = exact_schedule(routes, durations, num_microbatches, limit, edges=edges)
    assert limit is None or max(found.peak_microbatches) <= limit
    least = brute_force(routes, durations, num_microbatches, limit, edges)
    assert timeline(found, durations, edges).makespan == least


# Routes, durations, microbatches, their limit for each worker, and the makespan.
NAMED = {
    "1F1B 2": (straight_routes(2), TWICE, 4, one_f_one_b(2, 4).peak_microbatches, 15),
    "1F1B 4": (straight_routes(4), TWICE, 8, one_f_one_b(4, 8).peak_microbatches, 33),
    "1F1B 8": (straight_routes(8), EQUAL, 8, one_f_one_b(8, 8).peak_microbatches, 30),
    "Chimera 4": (both_ways(4), EQUAL, 8, chimera(4, 8).peak_microbatches, 18),
    "Chimera 6": (both_ways(6), TWICE, 6, chimera(6, 6).peak_microbatches, 26),
    "Chimera 8": (both_ways(8), EQUAL, 8, chimera(8, 8).peak_microbatches, 22),
    "interleaved": (looped_routes(4, 2), TWICE, 4, interleaved(4, 4, 2).peak_microbatches, 33),
    "ZB-H1": (straight_routes(4), HALVES, 8, (4,) * 4, 27),
    "ZB-H2": (straight_routes(4), HALVES, 8, (7,) * 4, 27),
    "ZB-V": (v_routes(4), HALVES, 8, (8,) * 4, 51),
}


@pytest.mark.parametrize("name", NAMED)
def test_exact_search_reaches_the_makespan_of_a_named_schedule(name: str) -> None:
    routes, durations, num_microbatches, limit, makespan = NAMED[name]
    found = exact_schedule(routes, durations, num_microbatches, limit)
    assert timeline(found, durations).makespan == makespan
    assert all(a <= b for a, b in zip(found.peak_microbatches, limit, strict=True))
