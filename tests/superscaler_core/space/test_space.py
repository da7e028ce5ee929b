"""The space: its sums, changes of one node, and brute force."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from superscaler_core.errors import PlanError
from superscaler_core.space import Space, SpaceEdge, SpaceNode, brute_force
from tests.superscaler_core.space.spaces import random_space


@pytest.mark.parametrize("seed", range(6))
def test_change_secs_equals_the_difference_of_two_sums(seed: int) -> None:
    space = random_space(seed)
    random = np.random.default_rng(seed)
    here = [int(random.integers(node.num_choices)) for node in space.nodes]
    for number, node in enumerate(space.nodes):
        for choice in range(node.num_choices):
            there = [*here[:number], choice, *here[number + 1 :]]
            change = space.change_secs(here, number, choice)
            assert change == space.secs(there) - space.secs(here)


def test_step_counts_every_microbatch_and_one_sync_of_every_equal_node() -> None:
    node = SpaceNode.of("a", "x", forward_secs=2, backward_secs=3, sync_secs=7, count=4)
    space = Space((node,), (SpaceEdge.of(0, 0, [[11]], [[13]], count=3),), microbatches=5)
    assert space.secs((0,)) == 4 * (5 * (2 + 3) + 7) + 3 * 5 * (11 + 13)


def test_memory_is_that_of_all_nodes_plus_the_largest_work_bytes() -> None:
    nodes = (
        SpaceNode.of("a", "x", forward_secs=1, resting_bytes=2, kept_bytes=3, work_bytes=50),
        SpaceNode.of("b", "x", forward_secs=1, resting_bytes=5, kept_bytes=7, work_bytes=40),
    )
    assert Space(nodes, in_flight=10).bytes((0, 0)) == 2 + 30 + 5 + 70 + 50


@pytest.mark.parametrize("seed", range(6))
def test_brute_force_finds_the_least_time_that_fits(seed: int) -> None:
    space = random_space(seed, has_memory=True, excluded=0.2)
    every = product(*(range(node.num_choices) for node in space.nodes))
    fitting = [space.secs(each) for each in every if space.bytes(each) <= space.memory_bytes]
    assert brute_force(space).secs == min(fitting)


def test_brute_force_raises_plan_error_if_nothing_fits() -> None:
    node = SpaceNode.of("a", "xy", forward_secs=1, resting_bytes=[5, 6])
    with pytest.raises(PlanError, match="no choice of 1 nodes fits: they hold at least 5"):
        brute_force(Space((node,), memory_bytes=4))


def test_brute_force_rejects_too_many_assignments() -> None:
    nodes = tuple(SpaceNode.of(f"n{i}", "xyzuvw", forward_secs=1) for i in range(12))
    with pytest.raises(PlanError, match="2,176,782,336 assignments: at most 2,000,000"):
        brute_force(Space(nodes))


def test_edge_costs_of_the_wrong_shape_are_rejected() -> None:
    node = SpaceNode.of("a", "xy", forward_secs=1)
    with pytest.raises(PlanError, match=r"edge from a to a: its costs have to be \[2, 2\]"):
        Space((node,), (SpaceEdge.of(0, 0, [[1]]),))


def test_node_costs_of_the_wrong_length_are_rejected() -> None:
    with pytest.raises(PlanError, match="node a with 2 choices"):
        SpaceNode.of("a", "xy", forward_secs=[1, 2, 3])
