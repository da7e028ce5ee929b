"""Alpa's stage planner on given stage costs, which are not sums of layer costs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, product

import numpy as np
import pytest

from superscaler_core.published.stages import Candidates, alpa_stages
from superscaler_core.published.stages.candidates import UNLIMITED
from superscaler_core.published.stages.problem import Array


def candidates(num_layers: int, sizes: list[int], secs: Callable[..., float]) -> Candidates:
    """Candidate stages with the times ``secs(first, last, choice)``."""
    shape = num_layers + 1, num_layers + 1, len(sizes)
    table = np.full(shape, np.inf)
    for first in range(num_layers):
        for last in range(first, num_layers):
            for choice in range(len(sizes)):
                table[first, last + 1, choice] = secs(first, last, choice)
    points = tuple((1 << num) - 1 for num in range(num_layers + 1))
    return Candidates(points, tuple(sizes), table, np.full(shape, UNLIMITED))


def least_of_all(stages: Candidates, num_devices: int, microbatches: int) -> float:
    """The least step of all cuts that use all devices, by brute force."""
    num, best = len(stages.points) - 1, float("inf")
    for count in range(num):
        for inner in combinations(range(1, num), count):
            ends = [0, *inner, num]
            for choices in product(range(len(stages.sizes)), repeat=count + 1):
                if sum(stages.sizes[c] for c in choices) == num_devices:
                    secs = [
                        stages.secs[a, b, c]
                        for a, b, c in zip(ends, ends[1:], choices, strict=False)
                    ]
                    best = min(best, sum(secs) + (microbatches - 1) * max(secs))
    return best


def test_alpa_test_case_gives_the_published_stages() -> None:
    """The optimum is 0.29528505: layers 0-3 and 4-7 on four devices each, shardings 2 and 4.

    Source: a run of Alpa's ``tests/pipeline_parallel/test_dynamic_programming.py``.
    """
    num_layers, num_shardings = 8, 5
    sizes = [size for size in (1, 2, 4, 8) for _ in range(num_shardings)]
    drawn = np.random.RandomState(42).rand(num_layers, num_layers, 4, num_shardings)
    stages = candidates(
        num_layers, sizes,
        lambda first, last, c: drawn[first, last, c // num_shardings, c % num_shardings],
    )  # fmt: skip
    value, chosen = alpa_stages(stages, 8, 16)
    assert value == pytest.approx(0.29528505, abs=1e-8)
    shardings = [(p, q, sizes[c], c % num_shardings) for p, q, c in chosen]
    assert shardings == [(0, 4, 4, 2), (4, 8, 4, 4)]


@pytest.mark.parametrize("seed, secs", [*enumerate([16, 84, 81, 64, 78, 45])])
def test_random_instances_equal_brute_force(seed: int, secs: int) -> None:
    drawn: Array = np.random.RandomState(seed).randint(1, 20, (4, 4, 3, 1))
    stages = candidates(4, [1, 2, 4], lambda first, last, c: float(drawn[first, last, c, 0]))
    value, _ = alpa_stages(stages, 4, 8)
    assert value == least_of_all(stages, 4, 8) == secs
