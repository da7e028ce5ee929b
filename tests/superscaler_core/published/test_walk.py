"""The walk: after moves, its price equals a new sum."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from superscaler_core.published.flexflow.walk import Walk, fastest_alone
from superscaler_core.space import Space, SpaceEdge, SpaceNode
from tests.superscaler_core.space.spaces import random_space


@pytest.mark.parametrize("has_memory", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_price_after_moves_equals_the_price_of_a_new_walk(seed: int, has_memory: bool) -> None:
    space = random_space(seed, has_memory=has_memory, excluded=0.2)
    random = Random(seed)
    walk = Walk(space, (0,) * len(space.nodes), 2.0)
    for _ in range(30):
        nodes = random.sample(range(len(space.nodes)), random.randint(1, 2))
        here, price = list(walk.assignment), walk.price
        rise = walk.move({i: random.randrange(space.nodes[i].num_choices) for i in nodes})
        assert walk.price == price + rise == Walk(space, walk.assignment, 2.0).price
        assert walk.fits == space.fits(walk.assignment)
        if walk.fits:
            assert walk.price == space.secs(walk.assignment)
        if random.random() < 0.5:
            walk.back()
            assert (walk.assignment, walk.price) == (here, price)


def test_excess_memory_adds_to_the_price() -> None:
    node = SpaceNode.of("a", "xy", forward_secs=[1, 1], resting_bytes=[4, 10], work_bytes=2)
    walk = Walk(Space((node,), memory_bytes=7), (0,), 0.5)
    assert walk.move({0: 1}) == 0.5 * 5


def test_infeasible_choices_cost_more_than_any_feasible_ones() -> None:
    nodes = tuple(SpaceNode.of(name, "xy", forward_secs=[1, 50]) for name in "ab")
    space = Space(nodes, (SpaceEdge.of(0, 1, [[inf, 3], [70, 2]]),))
    assert Walk(space, (0, 0)).price > max(space.secs(each) for each in ((0, 1), (1, 0), (1, 1)))


def test_fastest_alone_includes_edges_from_earlier_nodes() -> None:
    nodes = tuple(SpaceNode.of(name, "xy", forward_secs=[1, 2]) for name in "ab")
    assert fastest_alone(Space(nodes, (SpaceEdge.of(0, 1, [[9, 0], [0, 9]]),))) == (0, 1)
    assert fastest_alone(Space(nodes, (SpaceEdge.of(1, 0, [[9, 9], [0, 9]]),))) == (0, 1)
    assert fastest_alone(Space(nodes, (SpaceEdge.of(0, 0, [[9, 0], [0, 0]]),))) == (1, 0)
