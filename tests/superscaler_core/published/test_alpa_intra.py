"""Alpa's intra-op planner: comparison with published objectives and with brute force."""

from __future__ import annotations

from math import inf

import pytest

from superscaler_core.errors import PlanError
from superscaler_core.published.alpa.alpa_intra import alpa_intra
from superscaler_core.space import Space, SpaceEdge, SpaceNode, brute_force
from tests.covering import covering
from tests.superscaler_core.space.alpa_prototype import Mesh, mlp
from tests.superscaler_core.space.spaces import random_space


@covering(first=[0, 10], excluded=[0.0, 0.2, 0.5], has_memory=[False, True])
def test_solution_equals_brute_force(first: int, excluded: float, has_memory: bool) -> None:
    """Each case is 10 spaces."""
    for seed in range(first, first + 10):
        space = random_space(seed, excluded=excluded, has_memory=has_memory)
        found = alpa_intra(space)
        assert found.secs == brute_force(space).secs == space.secs(found.assignment)
        assert space.fits(found.assignment)
        # HiGHS stops at a relative gap of 1e-6.
        assert found.bound_secs == pytest.approx(found.secs, rel=1e-6)


@pytest.mark.parametrize(
    "mesh, layers, batch, width, cost",
    [
        (Mesh((4, 1)), 2, 1024, 128, 196614.0),  # two all-reduces of weights
        (Mesh((1, 4)), 2, 128, 1024, 786437.0),  # one all-reduce of activations
        (Mesh((1, 4)), 12, 1024, 128, 1179684.1),
        (Mesh((4, 1)), 12, 128, 1024, 8650767.0),
    ],
    ids=str,
)
def test_published_objectives_on_a_line_of_devices(
    mesh: Mesh, layers: int, batch: int, width: int, cost: float
) -> None:
    assert alpa_intra(mlp(mesh, layers, batch, width)).secs == pytest.approx(cost, rel=1e-3)


@pytest.mark.parametrize(
    "sizes, cost", [((4, 8), 26872.03), ((8, 4), 58330.03), ((3, 4), 46314.03)]
)
def test_published_objectives_on_a_grid_of_devices(sizes: tuple[int, int], cost: float) -> None:
    """Weights are reduced along the slow axis, and activations along the fast one."""
    space = mlp(Mesh(sizes, beta=(1.0, 0.01)), 2, 1024, 128)
    assert alpa_intra(space).secs == pytest.approx(cost, rel=1e-3)


@pytest.mark.parametrize("layers", [12, 32])
def test_cost_of_more_layers_on_a_grid_is_that_of_their_reductions(layers: int) -> None:
    mesh = Mesh((4, 8), beta=(1.0, 0.01))
    reduced = layers * mesh.all_reduce(128 * 128 * 4 / 8, 0)
    moved = (layers - 1) * mesh.all_reduce(1024 * 128 * 4 / 4, 1)
    found = alpa_intra(mlp(mesh, layers, 1024, 128))
    assert found.secs == pytest.approx(reduced + moved, rel=1e-3)
    assert found.bound_secs == pytest.approx(found.secs, rel=1e-6)


def test_less_memory_never_makes_a_step_faster() -> None:
    """Limits are between the need of the fastest assignment and the least need of any."""
    free = mlp(Mesh((4, 8), beta=(1.0, 0.01)), 3, 1024, 128)
    least = sum(held.min() for held in free.held_bytes)
    most = free.bytes(alpa_intra(free).assignment)
    secs = []
    for share in (1.0, 0.5, 0.1):
        limit = least + share * (most - least)
        space = Space(free.nodes, free.edges, memory_bytes=limit)
        found = alpa_intra(space)
        assert space.bytes(found.assignment) <= limit
        secs.append(found.secs)
    assert secs == sorted(secs)
    assert secs[0] < secs[-1]


def test_infeasible_memory_limit_raises_plan_error() -> None:
    node = SpaceNode.of("a", "xy", forward_secs=1, resting_bytes=[5, 6])
    with pytest.raises(PlanError, match="Alpa's intra-op planner: no choice of 1 nodes fits"):
        alpa_intra(Space((node,), memory_bytes=4))


def test_mutually_exclusive_choices_raise_plan_error() -> None:
    nodes = tuple(SpaceNode.of(name, "xy", forward_secs=1) for name in "abcd")
    pairs = [(a, b) for b in range(4) for a in range(b)]
    edges = tuple(SpaceEdge.of(a, b, [[inf, 0], [0, inf]]) for a, b in pairs)
    with pytest.raises(PlanError, match="no choice of 4 nodes fits"):
        alpa_intra(Space(nodes, edges))
