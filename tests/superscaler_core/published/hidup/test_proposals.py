"""Laws of HiDup's candidates: the largest microbatches that fit are found with few trials."""

from __future__ import annotations

from dataclasses import replace
from itertools import cycle
from math import ceil

import pytest

from superscaler_core.evaluation import Candidate, Request, Trial
from superscaler_core.published.hidup import propose_hidup
from tests.superscaler_core.planners.test_search import request

SIZES = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 768)
MB = 10**6
MEMORY_BYTES = 1000 * MB


def asked(num_devices: int) -> Request:
    return replace(
        request("mlp", num_devices), batch=1536, samples=SIZES, memory_bytes=MEMORY_BYTES
    )


def trials(num_devices: int, base: float, slope: float) -> dict[int, bool]:
    """Whether each size fits that is tried, if ``n`` samples need ``base + slope n`` MB."""
    waiting: list[Candidate] = list(propose_hidup(asked(num_devices)))
    found = {}
    while waiting:
        candidate = waiting.pop()
        peak = ceil((base + slope * candidate.samples) * MB)
        fits = peak <= MEMORY_BYTES
        found[candidate.samples] = fits
        trial = Trial(candidate, 1.0, peak, "" if fits else "needs more")
        waiting += candidate.follow(trial)
    return found


@pytest.mark.parametrize(
    "slope, base, num_devices",
    [*zip([0.01, 0.7, 2, 7, 40, 500] * 2, cycle([0, 300, 900, 999, 1100]), cycle([2, 64, 16, 2]))],
)
def test_largest_size_that_fits_is_found_with_at_most_five_trials(
    num_devices: int, base: float, slope: float
) -> None:
    found = trials(num_devices, base, slope)
    fit = [size for size in SIZES if ceil((base + slope * size) * MB) <= MEMORY_BYTES]
    assert max((size for size, fits in found.items() if fits), default=0) == max(fit, default=0)
    if fit:
        assert len(found) <= 5


def test_impossible_size_is_followed_by_the_next_smaller_one() -> None:
    (first,) = propose_hidup(asked(16))
    (second,) = first.follow(Trial(first, 0.0, 0, "a loop cannot be cut"))
    assert (first.samples, second.samples) == (64, 48)


def test_sizes_with_an_odd_number_of_microbatches_are_omitted() -> None:
    odd = replace(asked(16), batch=48, samples=(16, 48))
    assert list(propose_hidup(odd)) == []
