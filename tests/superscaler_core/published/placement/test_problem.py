"""The placement problem: times equal an event simulation, and no placement beats the bounds."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from superscaler_core.errors import PlanError
from superscaler_core.published.placement import (
    Operation,
    OperationResult,
    PlacementProblem,
    every_placement,
    with_backward,
)
from tests.superscaler_core.published.placement.problems import events, random_problem


def placements(problem: PlacementProblem) -> list[tuple[int, ...]]:
    return list(product(range(problem.num_devices), repeat=len(problem.groups)))


@pytest.mark.parametrize("seed", range(13))
def test_end_times_equal_those_of_an_event_simulation(seed: int) -> None:
    problem = random_problem(seed, most=6)
    some = placements(problem)[:: 1 + seed % 7]
    assert problem.ends(some).tolist() == [events(problem, each) for each in some]


@pytest.mark.parametrize("seed", range(8))
def test_no_placement_is_faster_than_the_lower_bounds(seed: int) -> None:
    problem = random_problem(seed, has_memory=False)
    some = np.array(placements(problem))
    secs = problem.ends(some).max(axis=1)
    assert secs.min() >= problem.bound_secs >= problem.critical_secs
    work = [
        [problem.group_secs[each == device, device].sum() for device in range(problem.num_devices)]
        for each in some
    ]
    assert np.all(secs >= np.max(work, axis=1))


@pytest.mark.parametrize("seed", range(6))
def test_instant_messages_add_no_time(seed: int) -> None:
    problem = random_problem(seed, has_memory=False)
    alone = PlacementProblem.of(problem.operations, problem.results)
    everything = [[device] * len(problem.groups) for device in range(problem.num_devices)]
    assert np.array_equal(alone.secs(everything), problem.group_secs.sum(axis=0))
    assert np.all(alone.secs(placements(problem)) <= problem.ends(placements(problem)).max(axis=1))


def test_backward_is_placed_with_its_forward_and_sends_the_gradient() -> None:
    forward = [Operation("a", (1.0, 1.0)), Operation("b", (1.0, 1.0))]
    made = with_backward(forward, [OperationResult(0, (1,), 3.0)], [(2.0, 2.0)] * 2)
    problem = PlacementProblem.of(*made, bytes_per_sec=1.0)
    assert problem.groups == ((0, 3), (1, 2))
    assert problem.secs([(0, 0), (0, 1)]).tolist() == [6.0, 12.0]


@pytest.mark.parametrize("seed", range(6))
def test_exhaustive_search_finds_the_fastest_placement_that_fits(seed: int) -> None:
    problem = random_problem(seed, has_memory=True)
    found = every_placement(problem)
    assert found.secs == found.bound_secs == problem.secs(placements(problem)).min()
    assert problem.fits(found.assignment)


def test_invalid_problems_raise_plan_error() -> None:
    pair = Operation("a", (1.0, 1.0)), Operation("b", (1.0,))
    with pytest.raises(PlanError, match=r"each has 2 times; wrong: \['b'\]"):
        PlacementProblem.of(pair, [])
    twins = Operation("a", (1.0,)), Operation("b", (1.0,))
    with pytest.raises(PlanError, match="readers have to come behind"):
        PlacementProblem.of(twins, [OperationResult(1, (0,), 1.0)])
    held = PlacementProblem.of([Operation(n, (1.0,), 2.0) for n in "ab"], [], memory_bytes=3.0)
    with pytest.raises(PlanError, match=r"every placement: 2 groups of 4 .* do not fit on"):
        every_placement(held)
    many = PlacementProblem.of([Operation(str(i), (1.0, 1.0)) for i in range(30)], [])
    with pytest.raises(PlanError, match="2 devices: at most 2,000,000 are tried"):
        every_placement(many)
