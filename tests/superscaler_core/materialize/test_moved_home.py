"""Transfers between equivalent devices have the cost of those on the first devices."""

from __future__ import annotations

import random
from itertools import combinations

import pytest

import rvdcomm as rv
from superscaler_core.cost import CommCosts
from superscaler_core.materialize.moved_home import moved_home
from superscaler_core.materialize.transfer import Transfer

SLOW, FAST = rv.Link(20e-6, 1e9), rv.Link(5e-6, 100e9)
HOSTS = rv.Topology.hosts([list(range(i, i + 4)) for i in range(0, 16, 4)], intra=FAST, inter=SLOW)
UNEVEN = rv.Topology.hosts([[0, 1, 2], [3, 4], [5, 6, 7]], intra=FAST, inter=SLOW)

ENDS = ("R(4)V(1)D(1,1)", "R(1)V(4)D(1,1)", "R(1)V(1)D(4,1)", "R(1)V(1)D(2,2)", "R(2)V(2)D(1,1)")


def test_moved_devices_keep_their_order_and_distances() -> None:
    src = rv.Layout((8, 12), "R(1)V(1)D(4,1)", (5, 6, 13, 14))
    dst = rv.Layout((8, 12), "R(4)V(1)D(1,1)", (5, 6, 13, 14))
    moved, _, devices = moved_home(src, dst, HOSTS)
    assert moved.ranks == (0, 1, 4, 5)
    assert devices == {0: 5, 1: 6, 4: 13, 5: 14}
    for a, b in combinations(moved.ranks, 2):
        assert HOSTS.distance(a, b) == HOSTS.distance(devices[a], devices[b])


def test_layouts_on_hosts_of_unequal_sizes_are_not_moved() -> None:
    end = rv.Layout((8, 12), "R(1)V(1)D(2,1)", (3, 4))
    assert moved_home(end, end, UNEVEN)[0] == end


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("method", ["rvd", "p2p"])
def test_moved_transfer_has_the_cost_of_the_original(seed: int, method: str) -> None:
    rng = random.Random(seed)
    ranks = tuple(rng.sample(range(16), 4))
    other = ranks if seed % 2 else tuple(rng.sample(range(16), 4))
    ends = rng.sample(ENDS, 2)
    src, dst = (rv.Layout((8, 12), e, r) for e, r in zip(ends, (ranks, other), strict=True))
    sub_transfer = Transfer(rv.Box((0, 0), (8, 12)), src, dst, "float32")
    comm_costs = CommCosts(HOSTS)
    planned = comm_costs._planned if method == "rvd" else comm_costs._pulled
    steps = planned(src, dst, "float32")
    assert comm_costs._steps((src, dst, "float32"), method) == tuple(steps)
    plan = rv.plan(src, dst, "float32", HOSTS, executor="dist")
    moved = rv.plan(*moved_home(src, dst, HOSTS)[:2], "float32", HOSTS, executor="dist")
    assert plan.cost == moved.cost
    assert comm_costs.secs(sub_transfer, method).devices == tuple(sorted({*ranks, *other}))
