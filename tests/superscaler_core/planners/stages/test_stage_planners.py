"""Each planner finds the least of its own objective, as brute force does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.planners.stages import (
    StageCut,
    StageProblem,
    alpa,
    dapple,
    galvatron,
    pipedream,
    pipedream_hierarchical,
    piper,
    tarnawski,
    tarnawski_scattered,
)
from superscaler_core.planners.stages.galvatron import UNITS, memory_units
from tests.superscaler_core.planners.stages import brute_force as brute
from tests.superscaler_core.planners.stages.problems import random_problem

ROUNDING = 1e-9
"""Relative: sums of the same times in another order."""

BATCHES, OF_A_BATCH = 5, 100


def found(planner: Callable[[StageProblem], StageCut], problem: StageProblem) -> float:
    try:
        return planner(problem).objective
    except PlanError:
        return float("inf")


PLANNERS: dict[str, tuple[Any, Any, dict[str, bool], dict[str, bool]]] = {
    "pipedream": (pipedream, brute.pipedream_cost, {"replicas_only": True}, {}),
    "dapple": (dapple, brute.dapple_cost, {"replicas_only": True}, {}),
    "piper": (piper, brute.piper_cost, {"is_graph": True}, {"is_graph": True}),
    "tarnawski": (tarnawski, brute.tarnawski_cost, {"is_graph": True}, {"is_graph": True}),
    "alpa": (alpa, brute.alpa_cost, {}, {}),
}
"""The planner, its objective, which cuts it may make, and which problems it is for."""


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("name", PLANNERS)
def test_a_planner_finds_the_least_of_its_objective(name: str, batch: int) -> None:
    planner, objective, which, kind = PLANNERS[name]
    for seed in range(batch * OF_A_BATCH, (batch + 1) * OF_A_BATCH):
        problem = random_problem(seed, **kind)
        least = brute.least(problem, objective, **which)
        assert found(planner, problem) == pytest.approx(least, rel=ROUNDING), seed


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("name", PLANNERS)
def test_a_cut_has_its_objective_and_fits(name: str, batch: int) -> None:
    planner, objective, _, kind = PLANNERS[name]
    for seed in range(batch * OF_A_BATCH, (batch + 1) * OF_A_BATCH, 10):
        problem = random_problem(seed, **kind)
        if found(planner, problem) < float("inf"):
            cut = planner(problem)
            assert objective(problem, cut) == pytest.approx(cut.objective, rel=ROUNDING), seed
            assert problem.fits(cut.stages), seed


UNLIKE: dict[str, tuple[Any, Any, dict[str, bool]]] = {
    "scattered": (
        partial(tarnawski_scattered, limit_secs=20.0), brute.least_scattered, {"is_graph": True},
    ),
    "hierarchical": (pipedream_hierarchical, brute.least_hierarchical, {}),
    "galvatron": (
        galvatron,
        lambda problem: brute.least_galvatron(problem, memory_units, UNITS),
        {"has_changes": True},
    ),
}  # fmt: skip
"""Those whose choices are more than a cut with degrees."""


@pytest.mark.parametrize("batch", range(BATCHES))
@pytest.mark.parametrize("name", UNLIKE)
def test_a_planner_finds_the_least_of_its_choices(name: str, batch: int) -> None:
    planner, least, kind = UNLIKE[name]
    for seed in range(batch * OF_A_BATCH, (batch + 1) * OF_A_BATCH):
        problem = random_problem(seed, **kind)
        assert found(planner, problem) == pytest.approx(least(problem), rel=ROUNDING), seed
