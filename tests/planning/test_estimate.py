"""Laws of estimates: the first candidate has the lowest counted cost, and none is lost."""

from __future__ import annotations

import random

import pytest

import rvdcomm as rv
from rvdcomm.planning.candidates import candidate_paths
from rvdcomm.planning.estimate import Estimator
from rvdcomm.planning.path import Path
from tests.oracle import all_rvds

SHAPE = (64, 64)
TOPOLOGY = rv.Topology.hosts(
    [range(4), range(4, 8), range(8, 12)], rv.Link(3.0, 8.0), rv.Link(50.0, 1.0)
)


def counted_secs(path: Path) -> float:
    estimator = Estimator(TOPOLOGY, 1)
    return sum(estimator.counted(step)[0] for step in path.steps)


@pytest.mark.parametrize("num_src, num_dst", [(4, 8), (8, 4), (4, 4)])
def test_first_candidate_has_the_lowest_counted_cost(num_src: int, num_dst: int) -> None:
    rng, dearer = random.Random(0), []
    ranks = range(num_src, num_src + num_dst)
    for _ in range(25):
        src = rv.Layout(SHAPE, rng.choice(all_rvds(num_src, 2)))
        dst = rv.Layout(SHAPE, rng.choice(all_rvds(num_dst, 2)), ranks)
        paths = list(candidate_paths(src, dst, 1, TOPOLOGY))
        first = Estimator(TOPOLOGY, 1).cheapest_first(paths)[0]
        if counted_secs(first) > min(map(counted_secs, paths)) * (1 + 1e-8):
            dearer.append(f"{src.rvd} -> {dst.rvd}")
    assert dearer == []


def test_cheapest_first_keeps_all_candidates() -> None:
    src = rv.Layout(SHAPE, "R(1)V(4)D(64,1)")
    dst = rv.Layout(SHAPE, "R(4)V(2)D(16,1)", range(256, 384))
    topology = rv.Topology.single_host(384, 0, 1.0)
    paths = list(candidate_paths(src, dst, 1, topology))
    ordered = Estimator(topology, 1).cheapest_first(paths)
    assert sorted(map(id, ordered)) == sorted(map(id, paths))
