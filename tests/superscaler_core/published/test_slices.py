"""TeraPipe's slices: the formula equals the timeline, the dynamic programme equals brute force."""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from superscaler_core.published.terapipe.schedule import terapipe, terapipe_edges
from superscaler_core.published.terapipe.slices import cut_slices, pipeline_secs
from superscaler_core.schedules import Durations, timeline


@pytest.mark.parametrize("slices, secs", [((4, 3, 2, 1), 22), ((2, 2, 2, 2, 2), 16)])
def test_timeline_of_slices_equals_the_formula(slices: tuple[int, ...], secs: int) -> None:
    num = len(slices)
    durations: Durations = {("F", d * num + i): t for d in range(4) for i, t in enumerate(slices)}
    times = timeline(terapipe(4, 1, num), {"B": 1, **durations}, terapipe_edges(4, num))
    ends = [span.end for row in times.rows for span in row if span.action.kind == "F"]
    assert max(ends) == pipeline_secs(slices, 4) == secs


def compositions(total: int) -> Iterator[tuple[int, ...]]:
    """All ordered ways to write a number as a sum of positive numbers."""
    if not total:
        yield ()
    for first in range(1, total + 1):
        yield from ((first, *rest) for rest in compositions(total - first))


@pytest.mark.parametrize("seed", range(6))
def test_dynamic_programme_equals_brute_force(seed: int) -> None:
    generator = random.Random(seed)
    num_stages, batch = generator.randint(1, 5), generator.randint(1, 3)
    length = generator.randint(1, 5)

    @cache
    def latency(size: int, tokens: int, before: int) -> int:
        return generator.randint(1, 20)

    def secs(size: int, slices: tuple[int, ...]) -> list[int]:
        return [latency(size, s, sum(slices[:i])) for i, s in enumerate(slices)]

    def every(sequences: int) -> Iterator[list[int]]:
        """For every possible cut, the seconds of all its slices."""
        if not sequences:
            yield []
        for size in range(1, sequences + 1):
            for slices in compositions(length):
                yield from ([*secs(size, slices), *rest] for rest in every(sequences - size))

    found = cut_slices(latency, num_stages, batch, length)
    assert found.secs == min(pipeline_secs(cut, num_stages) for cut in every(batch))
    chosen = [one for size, slices in found.groups for one in secs(size, slices)]
    assert sum(size for size, _ in found.groups) == batch
    assert pipeline_secs(chosen, num_stages) == found.secs


def test_later_slices_are_shorter_where_they_see_more_keys() -> None:
    found = cut_slices(lambda b, s, c: 600 + b * s * (20 + c + s / 2), 4, 1, 64, grain=4)
    ((_, slices),) = found.groups
    assert list(slices) == sorted(slices, reverse=True)
    assert slices[0] > slices[-1]


def test_grain_that_does_not_divide_the_length_is_rejected() -> None:
    with pytest.raises(ValueError, match="the grain of 3 tokens has to divide the length"):
        cut_slices(lambda b, s, c: 1.0, 2, 1, 8, grain=3)
