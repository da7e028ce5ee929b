"""Loops: finds a run of a sequence that repeats itself, such as the blocks of a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from itertools import islice

from superscaler_core.graph.repeats import runs_of

LEAST_LENGTH = 4
"""Shortest block that is worth a function of its own."""

MOST_PERIODS = 8
"""Number of block lengths that are tried, the likeliest first."""


def repeats_of(keys: Sequence[Hashable]) -> list[range]:
    """The places of equal blocks, one behind the other, that cover much of a sequence.

    Law (tests/superscaler_core/codegen/test_loops.py): all blocks have the same keys in the same
    order; there are at least two, or none.

    >>> repeats_of("x" + "abcd" * 3 + "y")
    [range(1, 5), range(5, 9), range(9, 13)]
    """
    runs = (run for period in _periods(keys) for run in runs_of(keys, period, 0, len(keys)))
    best = max(runs, key=lambda run: run.count * run.period - run.period, default=None)
    if best is None:
        return []
    starts = range(best.start, best.start + best.count * best.period, best.period)
    return [range(start, start + best.period) for start in starts]


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
