"""Race: find the fastest of several training methods by timing their steps in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median

HEATS = (3, 2, 3, 4)
"""Visits per remaining racer in each heat; after each heat the slower half leaves."""


def race(num: int, visit: Callable[[int], Sequence[float]]) -> dict[int, float]:
    """The median step time of each racer in seconds, by its number; the winner first.

    Racers that stay longer are timed more often. The racers of a heat take turns, so that a slow
    moment of the machine affects all of them.

    Args:
        num: number of racers.
        visit: runs a few steps of a racer, given by its number, and returns their seconds. If ranks
            race together, it must return equal seconds on all ranks.
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
