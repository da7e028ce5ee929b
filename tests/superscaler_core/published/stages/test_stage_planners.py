"""Each planner finds the minimum of its objective, as brute force does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.published.stages import (
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
from superscaler_core.published.stages.galvatron import UNITS, memory_units
from tests.superscaler_core.published.stages import brute_force as brute
from tests.superscaler_core.published.stages.problems import random_problem

ROUNDING = 1e-9
"""Relative tolerance: the same times are added in another order."""

SEEDS = range(70)


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
"""By name: the planner, its objective, options of its brute force, and options of its problems."""


@pytest.mark.parametrize("name", PLANNERS)
def test_planner_minimizes_its_objective(name: str) -> None:
    planner, objective, which, kind = PLANNERS[name]
    for seed in SEEDS:
        problem = random_problem(seed, **kind)
        least = brute.least(problem, objective, **which)
        assert found(planner, problem) == pytest.approx(least, rel=ROUNDING), seed


@pytest.mark.parametrize("name", PLANNERS)
def test_cut_fits_in_memory_and_has_the_reported_objective(name: str) -> None:
    planner, objective, _, kind = PLANNERS[name]
    for seed in SEEDS[::10]:
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
    "galvatron": (galvatron, lambda problem: brute.least_galvatron(problem, memory_units, UNITS),
     {"has_changes": True}),
}  # fmt: skip
"""Planners that choose more than a cut with degrees; each has a separate brute force."""


@pytest.mark.parametrize("name", UNLIKE)
def test_planner_with_other_choices_equals_brute_force(name: str) -> None:
    planner, least, kind = UNLIKE[name]
    for seed in SEEDS:
        problem = random_problem(seed, **kind)
        assert found(planner, problem) == pytest.approx(least(problem), rel=ROUNDING), seed
