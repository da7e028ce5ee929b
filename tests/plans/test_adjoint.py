"""Laws of the adjoint T* of a transition T: ``<g, T x>`` equals ``<T* g, x>``."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings

import rvdcomm as rv
from rvdcomm.plans.adjoint import adjoint, copies, dual
from tests.covering import each_value
from tests.oracle import Array, all_pairs, all_rvds, drawn, parts_of, random_pair, shards_of, sliced
from tests.strategies import layouts, seeds

SHAPE = (3, 5)
PAIRS = drawn(all_pairs(SHAPE, 4), 0.25, "adjoint")
MIXED = [rvd for rvd in all_rvds(12, 1) if rvd.r > 1 and rvd.v > 1]
SHUFFLED = [7, 2, 9, 4, 11, 0, 5, 10, 1, 8, 3, 6]


# --- layouts ------------------------------------------------------------------------------------


@given(layouts())
def test_dual_and_copies_keep_the_box_of_every_rank(layout: rv.Layout) -> None:
    for made in (dual(layout), copies(layout)):
        assert sorted(made.ranks) == sorted(layout.ranks)
        boxes = {rank: made.cell(rank).box for rank in made.ranks}
        assert boxes == {rank: layout.cell(rank).box for rank in layout.ranks}


@pytest.mark.parametrize("rvd", MIXED, ids=str)
def test_replicas_of_a_dual_part_hold_all_parts_of_the_layout(rvd: rv.RVD) -> None:
    layout = rv.Layout((24,), rvd, SHUFFLED)
    found: dict[tuple[int, object], list[int]] = {}
    for rank in layout.ranks:
        cell = dual(layout).cell(rank)
        found.setdefault((cell.part, cell.box), []).append(layout.cell(rank).part)
    assert [sorted(parts) for parts in found.values()] == [list(range(rvd.v))] * len(found)


# --- transitions --------------------------------------------------------------------------------


def summands(rng: np.random.Generator, total: Array, count: int) -> list[Array]:
    """Random arrays that add up to ``total``."""
    free = [rng.integers(-9, 9, total.shape) for _ in range(count - 1)]
    return [*free, total - sum(free)]


def gradients_of_parts(dst: rv.Layout, total: Array, seed: int) -> dict[int, Array]:
    """Any gradients that a loss can have: those of the replicas of every part add up."""
    rng = np.random.default_rng(seed)
    of_part = [summands(rng, total, dst.rvd.r) for _ in range(dst.rvd.v)]
    cells = {rank: dst.cell(rank) for rank in dst.ranks}
    return {rank: sliced(of_part[c.part][c.replica], c.box) for rank, c in cells.items()}


def gradients_of_copies(dst: rv.Layout, total: Array, seed: int) -> dict[int, Array]:
    """Every rank has its box of the gradient of the tensor."""
    return {rank: sliced(total, dst.cell(rank).box) for rank in dst.ranks}


def over_all_ranks(layout: rv.Layout, a: dict[int, Array], b: dict[int, Array]) -> int:
    """The inner product of all shards."""
    return sum(int((a[rank] * b[rank]).sum()) for rank in layout.ranks)


def over_one_replica(layout: rv.Layout, a: dict[int, Array], b: dict[int, Array]) -> int:
    """The inner product of the shards of the first replica."""
    ranks = [rank for rank in layout.ranks if layout.cell(rank).replica == 0]
    return sum(int((a[rank] * b[rank]).sum()) for rank in ranks)


CONVENTIONS: dict[str, tuple[Callable[..., dict[int, Array]], Callable[..., int]]] = {
    "parts": (gradients_of_parts, over_all_ranks),
    "copies": (gradients_of_copies, over_one_replica),
}
"""How gradients of ``dst`` are made, and the inner product that the adjoint keeps."""


def run(plan: rv.Plan, shards: dict[int, Array]) -> dict[int, Array]:
    return rv.simulate(plan, shards).shards


def products(src: rv.Layout, dst: rv.Layout, replica_grads: str, seed: int) -> tuple[int, int]:
    """``<g, T x>`` and ``<T* g, x>``."""
    gradients_of, inner = CONVENTIONS[replica_grads]
    x = shards_of(src, parts_of(src, seed=seed))
    total = np.random.default_rng(seed + 1).integers(-9, 9, src.shape)
    g = gradients_of(dst, total, seed + 2)
    y = run(rv.plan(src, dst, "int64"), x)
    back = rv.plan(*adjoint(src, dst, replica_grads), "int64")
    h = run(back, {rank: g[rank] for rank in back.src.ranks})
    return inner(dst, g, y), inner(src, h, x)


@each_value(pair=PAIRS, replica_grads=CONVENTIONS)
def test_backward_transition_is_the_adjoint_of_the_forward_one(
    pair: tuple[rv.Layout, rv.Layout], replica_grads: str
) -> None:
    there, back = products(*pair, replica_grads, seed=7)
    assert there == back


@pytest.mark.parametrize("replica_grads", CONVENTIONS)
@settings(max_examples=40, deadline=None)
@given(seed=seeds)
def test_backward_transition_is_the_adjoint_for_any_groups_and_cuts(
    replica_grads: str, seed: int
) -> None:
    there, back = products(*random_pair(random.Random(seed)), replica_grads, seed=seed % 1000)
    assert there == back


def test_backward_transition_is_the_adjoint_for_replicas_of_several_parts() -> None:
    # The layout does not say which replicas of the two parts have one reader: (0,2) and (3,1), or
    # (0,1) and (3,2). Therefore gradients of replicas of different parts are never added.
    src, dst = rv.Layout((5,), "R(4)V(1)D(1)"), rv.Layout((5,), "R(2)V(2)D(1)", [0, 2, 3, 1])
    found = {products(src, dst, "parts", seed) for seed in range(20)}
    assert [there for there, _ in found] == [back for _, back in found]
    assert len(found) > 10


EXAMPLES = [
    ("R(1)V(1)D(4)", "R(4)V(1)D(1)", "parts", "reduce_scatter"),
    ("R(4)V(1)D(1)", "R(1)V(1)D(4)", "parts", "mask"),
    ("R(1)V(4)D(1)", "R(1)V(1)D(4)", "parts", "all_gather"),
    ("R(1)V(4)D(1)", "R(4)V(1)D(1)", "parts", "all_reduce"),
    ("R(1)V(1)D(4)", "R(4)V(1)D(1)", "copies", "slice"),
    ("R(4)V(1)D(1)", "R(1)V(1)D(4)", "copies", "all_gather"),
    ("R(1)V(4)D(1)", "R(1)V(1)D(4)", "copies", "all_gather"),
    ("R(1)V(4)D(1)", "R(4)V(1)D(1)", "copies", None),
]


@pytest.mark.parametrize("src, dst, replica_grads, kind", EXAMPLES)
def test_backward_transition_is_planned_as_the_expected_collective(
    src: str, dst: str, replica_grads: str, kind: str | None
) -> None:
    layouts = rv.Layout((1 << 20,), src), rv.Layout((1 << 20,), dst)
    path = rv.plan(*adjoint(*layouts, replica_grads)).path
    assert [step.kind for step in path.steps] == ([kind] if kind else [])


def test_unknown_replica_grads_raises_layout_error() -> None:
    layout = rv.Layout((4,), "R(1)V(1)D(2)")
    words = r"replica_grads='sum' is unknown; use 'parts' or 'copies'\."
    with pytest.raises(rv.LayoutError, match=words):
        adjoint(layout, layout, "sum")
