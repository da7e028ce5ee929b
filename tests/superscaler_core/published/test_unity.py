"""Unity's search: the optimum of small spaces, and the local minima that it can leave."""

from __future__ import annotations

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.published.unity import substitutions, unity
from superscaler_core.space import Space, SpaceEdge, SpaceNode, brute_force
from tests.superscaler_core.space.spaces import random_space


@pytest.mark.parametrize("seed", range(6))
def test_search_with_a_large_alpha_reaches_the_optimum(seed: int) -> None:
    space = random_space(seed, has_memory=seed % 2 == 0, excluded=0.1)
    found = unity(space, budget=1000, alpha=3.0, secs_per_excess_byte=1.0)
    assert found.secs == brute_force(space).secs
    assert space.fits(found.assignment)


def chain(num: int, apart: float = 5.0) -> Space:
    """Nodes in a row. Each is faster with ``y``, but neighbours with different choices are slow."""
    nodes = [SpaceNode.of(f"n{i}", "xy", forward_secs=[1, 0]) for i in range(num)]
    edges = [SpaceEdge.of(i, i + 1, [[0, apart], [apart, 0]]) for i in range(num - 1)]
    return Space(tuple(nodes), tuple(edges))


def test_three_nodes_change_together_but_not_four() -> None:
    """Changing only one or two nodes is slower, and slower assignments are dropped."""
    assert unity(chain(3), alpha=1.0, start=(0, 0, 0)).assignment == (1, 1, 1)
    assert unity(chain(4), alpha=1.0, start=(0,) * 4).assignment == (0,) * 4


def test_larger_alpha_lets_the_search_leave_a_local_minimum() -> None:
    assert unity(chain(4), alpha=3.0, start=(0,) * 4).assignment == (1,) * 4


def test_a_large_space_is_searched_in_parts() -> None:
    """Each part is searched with all other nodes fixed. The second turn has other boundaries."""
    assert unity(chain(25, apart=0.1), start=(0,) * 25).assignment == (1,) * 25


@pytest.mark.parametrize("seed", range(3))
def test_search_ends_where_no_substitution_of_a_part_improves_it(seed: int) -> None:
    space = random_space(seed, most_nodes=30, most_choices=4)
    found = unity(space, budget=5, part_nodes=6)
    assert len(space.nodes) > 6
    for first in range(-3, len(space.nodes), 3):
        part = range(max(first, 0), min(first + 6, len(space.nodes)))
        for move in substitutions(space, part):
            there = [move.get(node, choice) for node, choice in enumerate(found.assignment)]
            assert space.secs(there) >= found.secs


def test_substitutions_are_all_choices_of_pairs_and_common_choices_of_paths() -> None:
    nodes = (
        SpaceNode.of("a", "xy", forward_secs=1),
        SpaceNode.of("b", "xyz", forward_secs=1),
        SpaceNode.of("c", "zy", forward_secs=1),
        SpaceNode.of("d", "xy", forward_secs=1),
    )
    edges = tuple(
        SpaceEdge.of(a, b, [[0] * nodes[b].num_choices] * nodes[a].num_choices)
        for a, b in ((0, 1), (2, 1), (1, 1))
    )
    made = list(substitutions(Space(nodes, edges), range(4)))
    # The node d alone, the pairs a b and b c, and the path a b c, which has only y in common.
    assert made[:2] == [{3: 0}, {3: 1}]
    assert len(made) == 2 + 2 * 3 + 3 * 2 + 1
    assert made[-1] == {1: 1, 0: 1, 2: 1}


def test_infeasible_memory_limit_raises_plan_error() -> None:
    node = SpaceNode.of("a", "xy", forward_secs=1, resting_bytes=[5, 6])
    with pytest.raises(PlanError, match="Unity: no choice of 1 nodes fits"):
        unity(Space((node,), memory_bytes=4))
