"""FlexFlow's walk: its acceptance rule, and the optimum of small spaces."""

from __future__ import annotations

from itertools import product
from math import exp, inf, sqrt
from random import Random

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.published.flexflow.flexflow import accepts, flexflow
from superscaler_core.space import Space, SpaceEdge, SpaceNode, brute_force
from tests.superscaler_core.space.spaces import random_space


@pytest.mark.parametrize(("alpha", "rise"), [(1000.0, 1e-3), (50.0, 4e-3), (2.0, 1.0)])
def test_price_rise_is_accepted_with_the_metropolis_probability(alpha: float, rise: float) -> None:
    random, num, chance = Random(7), 20_000, exp(-alpha * rise)
    often = sum(accepts(rise, alpha, random) for _ in range(num)) / num
    # Four standard deviations of the mean; the seed is fixed.
    assert abs(often - chance) < 4 * sqrt(chance * (1 - chance) / num)


def test_an_infinite_alpha_is_greedy() -> None:
    random = Random(0)
    assert not any(accepts(1e-12, inf, random) for _ in range(1000))
    assert accepts(0.0, inf, random)
    assert accepts(-1e-12, inf, random)


HILL = Space(
    (
        SpaceNode.of("a", "xy", forward_secs=[1, 0]),
        SpaceNode.of("b", "xy", forward_secs=[1, 0]),
        SpaceNode.of("c", "x", forward_secs=0),
    ),
    (SpaceEdge.of(0, 1, [[0, 5], [5, 0]]),),
)
"""Changing both nodes makes it faster, but changing only one makes it slower by 4."""


def test_greedy_walk_stays_in_a_local_minimum_that_others_leave() -> None:
    assert flexflow(HILL, budget=1000, alpha=inf, start=(0, 0, 0)).assignment == (0, 0, 0)
    # The walk returns to the best only every 10 steps, so that it can change the second node.
    assert flexflow(HILL, budget=1000, alpha=0.5, start=(0, 0, 0)).assignment == (1, 1, 0)


RIDGE = Space(
    (
        SpaceNode.of("a", "xy", forward_secs=[20, 0]),
        SpaceNode.of("b", "xy", forward_secs=[1, 0]),
        SpaceNode.of("c", "xy", forward_secs=[1, 0]),
        SpaceNode.of("d", "x", forward_secs=0),
    ),
    (SpaceEdge.of(0, 1, [[0, 5], [5, 0]]), SpaceEdge.of(1, 2, [[0, 9], [9, 0]])),
)
"""From y for a and x for b and c, every change of one node raises the price above 7."""


@pytest.mark.parametrize("propagate", [False, True])
def test_greedy_walk_needs_propagation_to_change_two_nodes_in_one_step(propagate: bool) -> None:
    """The choice of a is carried to b and on to c; the price is 0 then."""
    found = flexflow(RIDGE, budget=1000, alpha=inf, start=(1, 0, 0, 0), propagate=propagate)
    assert found.assignment == ((1, 1, 1, 0) if propagate else (1, 0, 0, 0))


@pytest.mark.parametrize("propagate", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_walk_reaches_the_optimum_of_a_small_space(seed: int, propagate: bool) -> None:
    space = random_space(seed, has_memory=seed % 2 == 0, excluded=0.1)
    found = flexflow(
        space, budget=2000, alpha=0.02, seed=seed, propagate=propagate, keep_last=False,
        secs_per_excess_byte=10.0,
    )  # fmt: skip
    assert found.secs == brute_force(space).secs
    assert space.fits(found.assignment)


@pytest.mark.parametrize("seed", range(6))
def test_the_last_node_keeps_its_choice(seed: int) -> None:
    space = random_space(seed)
    start = tuple(node.num_choices - 1 for node in space.nodes)
    found = flexflow(space, budget=2000, alpha=0.02, seed=seed, start=start, propagate=True)
    every = product(*(range(node.num_choices) for node in space.nodes[:-1]), start[-1:])
    assert found.assignment[-1] == start[-1]
    assert found.secs == min(map(space.secs, every))


def test_same_seed_gives_the_same_walk() -> None:
    space = random_space(3, most_nodes=9, most_choices=9)
    assert flexflow(space, budget=50, seed=1) == flexflow(space, budget=50, seed=1)


def test_infeasible_memory_limit_raises_plan_error() -> None:
    nodes = tuple(SpaceNode.of(n, "xy", forward_secs=1, resting_bytes=[5, 6]) for n in "ab")
    with pytest.raises(PlanError, match="FlexFlow: no choice of 2 nodes fits"):
        flexflow(Space(nodes, memory_bytes=9), budget=100)
