"""Elimination: exact on every space without a limit of memory."""

from __future__ import annotations

import numpy as np
import pytest

from superscaler_core.errors import PlanError
from superscaler_core.planners.space import Space, SpaceEdge, SpaceNode, brute_force
from superscaler_core.planners.space.elimination import eliminate
from tests.superscaler_core.planners.space.spaces import random_space


@pytest.mark.parametrize("seed", range(60))
def test_elimination_finds_what_brute_force_finds(seed: int) -> None:
    space = random_space(seed, most_nodes=6, excluded=0.2)
    found = eliminate(space)
    assert found.secs == found.bound_secs == brute_force(space).secs


def test_a_long_model_takes_tables_of_a_few_nodes() -> None:
    """Residuals around pairs of nodes; brute force would try 4 ** 400 assignments."""
    random, num = np.random.default_rng(0), 400
    nodes = tuple(SpaceNode.of(f"n{i}", "wxyz", forward_secs=1) for i in range(num))
    target = random.integers(0, 4, num).tolist()
    edges = []
    for src, dst in [(i, i + 1) for i in range(num - 1)] + [(i, i + 3) for i in range(0, 390, 2)]:
        table = random.integers(1, 9, (4, 4))
        table[target[src], target[dst]] = 0
        edges.append(SpaceEdge.of(src, dst, table))
    assert eliminate(Space(nodes, tuple(edges))).assignment == tuple(target)


def test_edges_between_two_nodes_add_up_in_both_directions() -> None:
    nodes = tuple(SpaceNode.of(name, "xy", forward_secs=1) for name in "ab")
    tables = [(0, 1, [[0, 2], [3, 9]]), (0, 1, [[8, 1], [3, 9]]), (1, 0, [[9, 9], [4, 9]])]
    edges = tuple(SpaceEdge.of(*each) for each in tables)
    found = eliminate(Space(nodes, edges))
    assert (found.assignment, found.secs) == ((0, 1), 2 + 2 + 1 + 4)


def test_choices_that_all_exclude_each_other_are_said() -> None:
    nodes = tuple(SpaceNode.of(name, "x", forward_secs=1) for name in "ab")
    with pytest.raises(PlanError, match="all choices of 2 nodes exclude each other"):
        eliminate(Space(nodes, (SpaceEdge.of(0, 1, [[np.inf]]),)))


def test_tables_that_are_too_large_are_not_made() -> None:
    names = [str(i) for i in range(40)]
    nodes = tuple(SpaceNode.of(f"n{i}", names, forward_secs=1) for i in range(6))
    zeros = np.zeros((40, 40))
    edges = tuple(SpaceEdge.of(i, j, zeros) for j in range(6) for i in range(j))
    with pytest.raises(PlanError, match="a table has more than 20,000,000 entries"):
        eliminate(Space(nodes, edges))
