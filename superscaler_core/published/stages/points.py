"""Points: the places where a model can be cut, each as the set of layers before the cut."""

from __future__ import annotations

from superscaler_core.errors import PlanError
from superscaler_core.published.stages.problem import StageProblem

MOST_DOWNSETS = 1500
"""The most downsets: a table of all pairs of so many points takes 18 MB for each of the degrees."""


def prefixes(problem: StageProblem) -> tuple[int, ...]:
    """The sets of the first layers, as bits, from none to all."""
    return tuple((1 << num) - 1 for num in range(len(problem.layers) + 1))


def downsets(problem: StageProblem, most: int = MOST_DOWNSETS) -> tuple[int, ...]:
    """All downsets (sets of layers with all layers that they read), as bits, smaller ones first.

    A chain of K layers has K + 1 downsets; three chains beside each other have the product of their
    numbers.

    Args:
        problem: the problem of the layers.
        most: the most downsets that are allowed.

    Raises:
        PlanError: there are more.

    Source: Tarnawski et al., 2020, who call them ideals.
    """
    needs = [0] * len(problem.layers)
    for writer, reader in problem.edges:
        needs[reader] |= 1 << writer
    found = {0}
    # Every downset except the empty one is a smaller downset and one more layer.
    for layer, needed in enumerate(needs):
        found |= {each | 1 << layer for each in found if each & needed == needed}
        if len(found) > most:
            raise PlanError(
                f"the {len(problem.layers)} layers have more than {most} downsets; use a planner "
                "of chains, or fewer and larger layers."
            )
    return tuple(sorted(found, key=lambda each: (each.bit_count(), each)))
