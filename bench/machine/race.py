"""Race: which of some ways to train is the fastest, by steps of all of them in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

HEATS = (3, 2, 3, 4)
"""Visits of every racer that is left; after each heat the slower half leaves."""


def race(num: int, visit: Callable[[int], Sequence[float]]) -> dict[int, float]:
    """The median seconds of a step of some racers, the winner first.

    Those that last longer are timed more often; all of a heat take turns, so that what slows the
    machine for a while slows all of them.

    Args:
        num: of racers.
        visit: seconds of some steps of one, by its number; where ranks race together, all of them
            are told the same.
    """
    secs: list[list[float]] = [[] for _ in range(num)]
    racing, left = [*range(num)], list[int]()
    for visits in HEATS:
        for _ in range(visits):
            for racer in racing:
                secs[racer] += visit(racer)
        racing.sort(key=lambda racer: median(secs[racer]))
        num_faster = (len(racing) + 1) // 2
        racing, left = racing[:num_faster], [*racing[num_faster:], *left]
    return {racer: median(secs[racer]) for racer in (*racing, *left)}
