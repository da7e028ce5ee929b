"""Repeats: finds a run of a sequence that repeats itself, such as the blocks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import islice

LEAST_LENGTH = 4
"""Shortest block that is worth a function of its own."""

MOST_PERIODS = 8
"""Number of block lengths that are tried, the likeliest first."""


def repeats_of(keys: Sequence[Hashable]) -> list[range]:
    """The places of equal blocks, one behind the other, that cover much of a sequence.

    Law (tests/superscaler_core/codegen/test_repeats.py): all blocks have the same keys in the same
    order; there are at least two, or none.

    >>> repeats_of("x" + "abcd" * 3 + "y")
    [range(1, 5), range(5, 9), range(9, 13)]
    """
    best = 0, 0, 0
    # With period p, places i and i + p have equal keys. A longer run covers more.
    for period in _periods(keys):
        run = 0
        for place in range(len(keys) - period):
            run = run + 1 if keys[place] == keys[place + period] else 0
            covered = run // period * period
            if run >= period and covered > best[0]:
                best = covered, period, place + 1 - run
    covered, period, start = best
    count = covered // period + 1 if period else 0
    return [range(start + i * period, start + (i + 1) * period) for i in range(count)]


def _periods(keys: Sequence[Hashable]) -> list[int]:
    """The most frequent distances between a key and its next occurrence."""
    last: dict[Hashable, int] = {}
    found: Counter[int] = Counter()
    for place, key in enumerate(keys):
        if key in last:
            found[place - last[key]] += 1
        last[key] = place
    likely = (period for period, _ in found.most_common() if period >= LEAST_LENGTH)
    return sorted(islice(likely, MOST_PERIODS))
