"""Brute force: the best of all assignments of a small space; the oracle of all planners."""

from __future__ import annotations

from itertools import product

from superscaler_core.errors import PlanError
from superscaler_core.space.space import Solution, Space

MOST_ASSIGNMENTS = 2_000_000
"""The most assignments that are tried; they take some 20 s."""


def brute_force(space: Space) -> Solution:
    """The assignment of the least time that fits in memory; the first of equal ones.

    Raises:
        PlanError: no assignment fits, or there are too many to try all.
    """
    if space.num_assignments > MOST_ASSIGNMENTS:
        raise PlanError(
            f"brute force over {space.num_assignments:,} assignments: at most "
            f"{MOST_ASSIGNMENTS:,} are tried; use a planner."
        )
    choices = product(*(range(node.num_choices) for node in space.nodes))
    fitting = (each for each in choices if space.fits(each))
    best = min(fitting, key=space.secs, default=None)
    if best is None:
        raise space.none_fits("brute force")
    return space.solution(best, space.secs(best))
