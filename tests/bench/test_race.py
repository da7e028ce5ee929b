"""Laws of races between training methods."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from bench.machine.race import HEATS, race


@pytest.mark.parametrize("num", [1, 2, 5, 12])
def test_the_winner_is_the_fastest_and_is_timed_most(num: int) -> None:
    visits: Counter[int] = Counter()

    def visit(racer: int) -> list[float]:
        visits[racer] += 1
        return [10.0 + (racer * 7) % num]

    found = race(num, visit)
    assert [*found] == sorted(found, key=lambda racer: found[racer])
    assert min(found) == 0
    assert sorted(found) == [*range(num)]
    assert next(iter(found)) == 0
    assert visits[0] == sum(HEATS)
    assert min(visits.values()) == (HEATS[0] if num > 1 else sum(HEATS))


def test_winner_is_one_of_the_two_fastest_despite_10_percent_noise() -> None:
    """The racers are 5 % apart; in 95 of 100 races the winner is one of the two fastest."""
    rng = np.random.default_rng(0)

    def visit(racer: int) -> list[float]:
        return [*(1.0 + 0.05 * racer) * (1 + 0.1 * rng.standard_normal(3))]

    winners = [next(iter(race(12, visit))) for _ in range(100)]
    assert sum(winner <= 1 for winner in winners) >= 95
