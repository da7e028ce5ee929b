"""Laws of cells: the values computed for one rank equal those that the placement lists."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given

import rvdcomm as rv
from rvdcomm.layout import Box
from rvdcomm.planning.binding import Binding, refine
from rvdcomm.planning.cells import Cells
from tests.oracle import all_pairs, random_pair, random_topology
from tests.planning.placements import placement_of
from tests.strategies import seeds

SHAPE = (8, 24)
HOSTS = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(0, 2.0), rv.Link(0, 1.0))


def sources(seed: int) -> list[rv.Layout | Binding]:
    """Two layouts of random ranks and cuts, and, if the pair is regular, its bindings."""
    src, dst = random_pair(random.Random(seed))
    topology = rv.Topology.single_host(1 + max(*src.ranks, *dst.ranks), 0, 1.0)
    return [src, dst, *(refine(src, dst, topology) or ())]


def faults(source: rv.Layout | Binding, cells: Cells, group: set[int]) -> list[str]:
    """Where ``cells`` differ from the placement of ``source`` within ``group``."""
    wrong = []
    for holding in placement_of(source).holdings:
        members = tuple(rank for rank in holding.ranks if rank in group)
        boxes = tuple(box for box in holding.boxes if not box.is_empty)
        for rank in members:
            key, part = cells.key(rank), cells.part(rank)
            if (cells.boxes(key), part) != (boxes, holding.part):
                wrong.append(f"rank {rank} holds {boxes} of part {holding.part}")
            if boxes and cells.holders(key, part) != members:
                wrong.append(f"rank {rank} is one of {members}")
            wrong += [f"{box}" for box in boxes if key not in set(cells.meeting(box))]
    return wrong


@given(seeds)
def test_cells_of_all_ranks_are_those_of_the_placement(seed: int) -> None:
    for source in sources(seed):
        ranks = set(placement_of(source).ranks)
        assert faults(source, Cells(source, min(ranks)), ranks) == []


@pytest.mark.parametrize("topology", [None, HOSTS], ids=["one host", "two hosts"])
def test_cells_of_a_group_are_those_of_the_placement_within_it(
    topology: rv.Topology | None,
) -> None:
    wrong = []
    for src, dst in all_pairs(SHAPE, 8):
        pair = refine(src, dst, topology or rv.Topology.single_host(8, 0, 1.0))
        assert pair is not None
        both = zip(pair[0].targets, pair[1].targets, strict=True)
        free = frozenset(a for a, (s, t) in enumerate(both) if s != t)
        for binding in pair:
            for rank in range(8):
                group = set(binding.grid.group(rank, free))
                wrong += faults(binding, Cells(binding, rank, free), group)
    assert wrong == []


@given(seeds)
def test_meeting_yields_every_cell_that_overlaps_a_box(seed: int) -> None:
    rng = random.Random(seed)
    for source in sources(seed):
        cells = Cells(source, min(placement_of(source).ranks))
        shape = placement_of(source).shape
        low = tuple(rng.randint(0, size) for size in shape)
        box = Box(low, tuple(rng.randint(a, size) for a, size in zip(low, shape, strict=True)))
        named = set() if box.is_empty else set(cells.meeting(box))
        met = {
            cells.key(holding.ranks[0])
            for holding in placement_of(source).holdings
            if any(box.intersect(other) for other in holding.boxes)
        }
        assert met <= named


# --- views --------------------------------------------------------------------------------------


def elements(boxes: tuple[Box, ...], shape: tuple[int, ...]) -> list[int]:
    """Flat numbers of the elements of some boxes of an array, ascending."""
    flat = np.arange(np.prod(shape, dtype=int)).reshape(shape)
    whole = Box.of_shape(shape)
    return sorted(n for box in boxes for n in flat[box.slices_within(whole)].ravel().tolist())


def states_of(plan: rv.Plan) -> list[rv.Layout | Binding]:
    states = [
        state
        for step in plan.path.steps
        for step_exchange in step.step_exchanges
        for state in step_exchange
    ]
    return [plan.src, plan.dst, *(state.source for state in states)]


def faults_in_view(plan: rv.Plan) -> list[str]:
    """Cells whose boxes in the view of their path have other elements than the placement."""
    view, wrong = plan.path.view, []
    dims = tuple(size for sizes in view.parts for size in sizes)
    for source in states_of(plan):
        cells = Cells(source, view=view)
        for holding in placement_of(source).holdings:
            boxes = cells.boxes(cells.key(holding.ranks[0]))
            if elements(boxes, dims) != elements(holding.boxes, plan.src.shape):
                wrong.append(f"{source} in {view}: {holding.boxes} are {boxes}")
    return wrong


@pytest.mark.parametrize("topology", [None, HOSTS], ids=["one host", "two hosts"])
def test_every_cell_of_an_even_path_is_one_box_of_its_view(topology: rv.Topology | None) -> None:
    wrong, num_views = [], 0
    for src, dst in all_pairs(SHAPE, 8):
        plan = rv.plan(src, dst, "int64", topology)
        num_views += not plan.path.view.is_whole
        wrong += faults_in_view(plan)
        for source in states_of(plan):
            cells = Cells(source, view=plan.path.view)
            wrong += [f"{source}" for key in cells.all_keys() if len(cells.boxes(key)) != 1]
    assert wrong == []
    assert num_views > 0


@given(seeds)
def test_cells_in_the_view_of_any_path_have_the_elements_of_the_placement(seed: int) -> None:
    rng = random.Random(seed)
    src, dst = random_pair(rng)
    assert faults_in_view(rv.plan(src, dst, "int64", random_topology(rng))) == []
