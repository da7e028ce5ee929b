"""Elimination of nodes with at most two neighbours keeps the optimum."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from superscaler_core.space import Space, SpaceEdge, SpaceNode, brute_force
from superscaler_core.space.elimination import Core
from tests.superscaler_core.space.spaces import random_space


def least_of_core(core: Core) -> tuple[float, dict[int, int]]:
    """The least sum of a core's costs, by brute force, and the choices that give it."""
    nodes = list(core.node_secs)
    best: tuple[float, dict[int, int]] = np.inf, {}
    for choices in product(*(range(core.node_secs[node].size) for node in nodes)):
        chosen = dict(zip(nodes, choices, strict=True))
        secs = core.secs + sum(core.node_secs[node][chosen[node]] for node in nodes)
        secs += sum(table[chosen[a], chosen[b]] for (a, b), table in core.pair_secs.items())
        best = min(best, (secs, chosen), key=lambda each: each[0])
    return best


@pytest.mark.parametrize("seed", range(8))
def test_core_has_the_same_optimum_as_the_space(seed: int) -> None:
    space = random_space(seed, excluded=0.2)
    core = Core.of(space)
    core.eliminate()
    secs, chosen = least_of_core(core)
    assert space.secs(core.assignment(chosen)) == secs == brute_force(space).secs


def test_blocks_with_residual_connections_are_eliminated_completely() -> None:
    """64 blocks, each a branch and a sum, with an edge that skips the branch."""
    random = np.random.default_rng(7)
    names = [f"{kind}{i}" for i in range(64) for kind in ("branch", "sum")]
    nodes = tuple(SpaceNode.of(name, "abcde", forward_secs=random.random(5)) for name in names)
    pairs = [(i, i + 1) for i in range(127)] + [(i, i + 2) for i in range(1, 126, 2)]
    space = Space(nodes, tuple(SpaceEdge.of(a, b, random.random((5, 5))) for a, b in pairs))
    core = Core.of(space)
    core.eliminate()
    assert not core.node_secs
    # The same numbers are added in another order.
    assert space.secs(core.assignment({})) == pytest.approx(core.secs, rel=1e-12)


def test_fully_connected_nodes_are_not_eliminated() -> None:
    nodes = tuple(SpaceNode.of(name, "xy", forward_secs=[1, 2]) for name in "abcd")
    pairs = [(a, b) for b in range(4) for a in range(b)]
    core = Core.of(Space(nodes, tuple(SpaceEdge.of(a, b, np.ones((2, 2))) for a, b in pairs)))
    core.eliminate()
    assert sorted(core.node_secs) == [0, 1, 2, 3]
