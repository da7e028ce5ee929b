"""Laws of cells: what is computed about one rank is what the placement lists."""

from __future__ import annotations

import random

import pytest
from hypothesis import given

import rvdcomm as rv
from rvdcomm.layout import Box
from rvdcomm.planning.binding import Binding, refine
from rvdcomm.planning.cells import Cells
from tests.oracle import all_pairs, random_pair
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
    for holding in source.placement.holdings:
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
        ranks = set(source.placement.ranks)
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
def test_every_cell_that_meets_a_box_is_named(seed: int) -> None:
    rng = random.Random(seed)
    for source in sources(seed):
        cells = Cells(source, min(source.placement.ranks))
        shape = source.placement.shape
        low = tuple(rng.randint(0, size) for size in shape)
        box = Box(low, tuple(rng.randint(a, size) for a, size in zip(low, shape, strict=True)))
        named = set() if box.is_empty else set(cells.meeting(box))
        met = {
            cells.key(holding.ranks[0])
            for holding in source.placement.holdings
            if any(box.intersect(other) for other in holding.boxes)
        }
        assert met <= named
