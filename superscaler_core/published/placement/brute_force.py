"""Every placement: the best placement of a small problem; the oracle of the placement planners."""

from __future__ import annotations

from itertools import islice, product

import numpy as np

from superscaler_core.errors import PlanError
from superscaler_core.published.placement.problem import MAX_AT_ONCE, PlacementProblem
from superscaler_core.space import Solution

MOST_PLACEMENTS = 2_000_000
"""The most placements that are tried; they take some minutes for a hundred operations."""


def every_placement(problem: PlacementProblem) -> Solution:
    """The placement of the least time; the first of equal ones.

    Raises:
        PlanError: no placement fits, or there are too many to try all.
    """
    num = problem.num_devices ** len(problem.groups)
    if num > MOST_PLACEMENTS:
        raise PlanError(
            f"{num:,} placements of {len(problem.groups)} groups on {problem.num_devices} devices: "
            f"at most {MOST_PLACEMENTS:,} are tried; use a planner."
        )
    choices = product(range(problem.num_devices), repeat=len(problem.groups))
    best, best_secs = (0,) * len(problem.groups), np.inf
    while some := list(islice(choices, MAX_AT_ONCE)):
        secs = problem.secs(some)
        least = int(secs.argmin())
        if secs[least] < best_secs:
            best, best_secs = some[least], float(secs[least])
    return problem.solution(best, "every placement", best_secs)
