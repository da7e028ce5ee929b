"""Placement planners without learning: exact planners reach the optimum, others never beat it."""

from __future__ import annotations

from math import inf

import numpy as np
import pytest

from bench.placement.shapes import Machine, inception, nmt, rnnlm
from superscaler_core.errors import PlanError
from superscaler_core.published.placement import (
    Operation,
    OperationResult,
    PlacementProblem,
    by_patterns,
    earliest_finish,
    every_placement,
    expert,
    integer_placement,
    min_cut,
)
from tests.superscaler_core.published.placement.problems import random_problem


@pytest.mark.parametrize("seed", range(15))
def test_integer_programme_equals_exhaustive_search(seed: int) -> None:
    problem = random_problem(seed, most=6)
    found = integer_placement(problem)
    assert found.secs == every_placement(problem).secs
    assert found.secs * (1 - 1e-5) <= found.bound_secs <= found.secs


@pytest.mark.parametrize("seed", range(7))
@pytest.mark.parametrize("planner", [earliest_finish, min_cut])
def test_heuristics_are_never_faster_than_exhaustive_search(planner, seed: int) -> None:
    problem = random_problem(seed, has_memory=False)
    found = planner(problem)
    assert found.secs == problem.secs(found.assignment)
    assert found.secs >= every_placement(problem).secs >= found.bound_secs


@pytest.mark.parametrize("seed", range(6))
def test_placement_of_earliest_finish_fits_in_memory(seed: int) -> None:
    problem = random_problem(seed, has_memory=True)
    assert problem.fits(earliest_finish(problem).assignment)


@pytest.mark.parametrize("planner", [every_placement, integer_placement, earliest_finish])
def test_operation_is_placed_on_a_device_that_can_run_it(planner) -> None:
    operations = [Operation("a", (inf, 5.0)), Operation("b", (1.0, inf))]
    problem = PlacementProblem.of(operations, [OperationResult(0, (1,), 1.0)], bytes_per_sec=1.0)
    assert planner(problem).assignment == (1, 0)


# --- min cut ------------------------------------------------------------------------------------


def cliques(num: int, size: int) -> PlacementProblem:
    """Cliques of operations with much traffic, and one edge of little traffic to the next one."""
    names = [(clique, i) for i in range(size) for clique in range(num)]
    number = {name: i for i, name in enumerate(names)}
    results = [
        OperationResult(min(a, b), (max(a, b),), 100.0)
        for clique in range(num)
        for i in range(size)
        for j in range(i)
        for a, b in [(number[clique, i], number[clique, j])]
    ]
    faint = [OperationResult(number[c, 0], (number[c + 1, 0],), 1.0) for c in range(num - 1)]
    operations = [Operation(f"{name}", (1.0,) * num) for name in names]
    return PlacementProblem.of(operations, results + faint, bytes_per_sec=100.0)


@pytest.mark.parametrize("num, size", [(2, 3), (2, 5), (3, 4), (4, 3)])
def test_min_cut_cuts_the_edges_with_little_traffic(num: int, size: int) -> None:
    found = np.array(min_cut(cliques(num, size)).assignment).reshape(size, num)
    assert np.all(found == found[0])
    assert len(set(found[0])) == num


def test_min_cut_balances_work_by_the_speed_of_processors() -> None:
    operations = [Operation(f"{i}", (9.0, 1.0, 1.0)) for i in range(19)]
    problem = PlacementProblem.of(operations, [])
    shares = np.bincount(min_cut(problem, slack=0.0).assignment, minlength=3)
    assert shares.tolist() == [1, 9, 9]
    assert np.bincount(min_cut(problem, [1, 2], slack=0.0).assignment).tolist()[0] == 0


# --- rules, and the three shapes ----------------------------------------------------------------


def test_expert_places_groups_by_the_name_of_their_first_operation() -> None:
    problem = rnnlm(Machine(2), layers=2, steps=2, runs=1)
    found = expert(problem, by_patterns({"layer0.*": 0, "*": 1}))
    assert found.assignment == (0, 1, 1)
    with pytest.raises(PlanError, match=r"no pattern of layer0.\* fits layer1.step0; add"):
        expert(problem, by_patterns({"layer0.*": 0}))
    with pytest.raises(
        PlanError, match=r"expert: layer0.step0 on device 7; the devices are 0 to 1"
    ):
        expert(problem, lambda name: 7)


SHAPES = {"rnnlm": rnnlm, "nmt": nmt, "inception": inception}
SIZES = {
    "rnnlm": {"layers": 2, "steps": 4, "runs": 1},
    "nmt": {"layers": 2, "steps": 3, "runs": 1},
    "inception": {"blocks": 1},
}


@pytest.mark.parametrize("name", SHAPES)
def test_integer_programme_finds_the_optimum_of_the_benchmark_shapes(name: str) -> None:
    problem = SHAPES[name](Machine(2), **SIZES[name])
    best = every_placement(problem).secs
    assert best < 0.8 * problem.secs([0] * len(problem.groups))
    assert integer_placement(problem).secs == pytest.approx(best, rel=1e-6)
