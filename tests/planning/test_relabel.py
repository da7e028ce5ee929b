"""Laws of relabelling: no order of few ranks needs fewer bytes, by the bound and by the plan."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from itertools import permutations, product

import pytest

import rvdcomm as rv
from rvdcomm.cost import lower_bound
from tests.oracle import all_rvds
from tests.planning.test_transfer import levels

SHAPE = (12, 20)
TOPOLOGIES = {
    "6 on one level": levels(6),
    "3 hosts of 2": levels(6, 2),
    "2 hosts of 3": levels(6, 3),
    "uneven hosts": rv.Topology.hosts([[0, 4, 5, 2], [1, 3]], rv.Link(0, 8.0), rv.Link(0, 1.0)),
}
topologies = pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)


def entering(src: rv.Layout, dst: rv.Layout, topology: rv.Topology) -> tuple[int, int]:
    """Bytes that must cross hosts, then all bytes."""
    bound = lower_bound(src, dst, 1, topology)
    return bound.host_bytes, bound.wire_bytes


def pairs_of(
    seed: int, count: int, rvds: list[rv.RVD] | None = None
) -> list[tuple[rv.Layout, rv.RVD, str]]:
    """Layouts of six shuffled ranks with either cut rule, and the wanted RVD and cut rule."""
    rng, rvds = random.Random(seed), rvds or all_rvds(6, 2)
    return [
        (
            rv.Layout(SHAPE, rng.choice(rvds), rng.sample(range(6), 6), rng.choice(RULES)),
            rng.choice(rvds),
            rng.choice(RULES),
        )
        for _ in range(count)
    ]


RULES = ("chunk", "balanced")
RVDS = [rvd for rvd in all_rvds(4, 2) if rvd.v == 1]
"""RVDs without value parts, for which a plan may move more than the bound."""


def best_of_all(src: rv.Layout, rvd: rv.RVD, cuts: str, topology: rv.Topology) -> tuple[int, int]:
    """Brute force over all orders."""
    layouts = {rv.Layout(SHAPE, rvd, ranks, cuts) for ranks in permutations(range(6))}
    return min(entering(src, dst, topology) for dst in layouts)


def chosen(src: rv.Layout, rvd: rv.RVD, cuts: str, topology: rv.Topology) -> rv.Layout:
    ranks = rv.best_ranks(src, rvd, topology, ranks=range(6), cuts=cuts)
    return rv.Layout(SHAPE, rvd, ranks, cuts)


def dearer(pairs: list[tuple[rv.Layout, rv.RVD, str]], topology: rv.Topology) -> list[str]:
    """Pairs for which some order is better than the chosen one."""
    return [
        f"{src} -> {rvd} {cuts}"
        for src, rvd, cuts in pairs
        if entering(src, chosen(src, rvd, cuts, topology), topology)
        != best_of_all(src, rvd, cuts, topology)
    ]


@topologies
def test_best_ranks_are_optimal_without_dst_replicas_and_parts(topology: rv.Topology) -> None:
    cut = [rvd for rvd in all_rvds(6, 2) if rvd.r == rvd.v == 1]
    pairs = [(src, cut[i % len(cut)], cuts) for i, (src, _, cuts) in enumerate(pairs_of(0, 7))]
    assert dearer(pairs, topology) == []


def test_best_ranks_are_optimal_with_replicas_on_one_level() -> None:
    assert dearer(pairs_of(1, 8, [rvd for rvd in all_rvds(6, 2) if rvd.v == 1]), levels(6)) == []


@topologies
def test_best_ranks_are_mostly_optimal_and_never_worse_than_the_given_order(
    topology: rv.Topology,
) -> None:
    pairs = pairs_of(2, 10)
    for src, rvd, cuts in pairs:
        found = entering(src, chosen(src, rvd, cuts, topology), topology)
        assert found <= entering(src, rv.Layout(SHAPE, rvd, range(6), cuts), topology)
    assert len(dearer(pairs, topology)) <= 2


@pytest.mark.parametrize("src, dst", list(product(RVDS, RVDS))[::5], ids=str)
def test_plan_to_best_ranks_moves_the_least_bound_of_all_orders(src: rv.RVD, dst: rv.RVD) -> None:
    topology = levels(4)
    before = rv.Layout(SHAPE, src, (2, 0, 3, 1))
    after = rv.Layout(SHAPE, dst, rv.best_ranks(before, dst, topology))
    moved = rv.plan(before, after, "uint8", topology).cost.wire_bytes
    orders = {rv.Layout(SHAPE, dst, ranks) for ranks in permutations(range(4))}
    assert moved == min(lower_bound(before, x, 1, topology).wire_bytes for x in orders)


# --- examples -----------------------------------------------------------------------------------


def test_best_ranks_keep_shards_that_are_already_in_place() -> None:
    src = rv.Layout(SHAPE, "R(2)V(1)D(1,3)", (5, 3, 1, 0, 2, 4))
    assert rv.Layout(SHAPE, src.rvd, rv.best_ranks(src, src.rvd)) == src


def test_ties_keep_the_given_order() -> None:
    src = rv.Layout(SHAPE, "R(6)V(1)D(1,1)")
    assert rv.best_ranks(src, "R(1)V(1)D(1,6)", ranks=(3, 1, 5, 0, 2, 4)) == (3, 1, 5, 0, 2, 4)


def test_best_ranks_place_replicas_so_that_each_byte_crosses_hosts_once() -> None:
    # Ranks 0 and 1 hold all elements; 2 to 7, on three hosts, want two replicas of thirds.
    topology = levels(8, 2)
    src = rv.Layout((12,), "R(1)V(1)D(2)")
    dst = rv.Layout(
        (12,), "R(2)V(1)D(3)", rv.best_ranks(src, "R(2)V(1)D(3)", topology, ranks=range(2, 8))
    )
    assert entering(src, dst, topology)[0] == 12
    assert entering(src, rv.Layout((12,), dst.rvd, range(2, 8)), topology)[0] == 24


def test_best_ranks_choose_holders_among_more_ranks_than_needed() -> None:
    src = rv.Layout((12,), "R(1)V(1)D(6)", (0, 1, 2, 3, 4, 5))
    assert rv.best_ranks(src, "R(1)V(1)D(2)", levels(6, 3)) in {
        (a, b) for a in (0, 1, 2) for b in (3, 4, 5)
    }


def test_best_ranks_on_three_levels_keep_the_order_of_src() -> None:
    topology = levels(8, 2, 4)
    src = rv.Layout((16,), "R(1)V(1)D(8)", (5, 4, 7, 6, 1, 0, 3, 2))
    assert rv.best_ranks(src, "R(1)V(1)D(8)", topology) == src.ranks


@pytest.mark.parametrize(
    "rvd, ranks, match",
    [
        ("R(1)V(1)D(4)", [0, 1, 2], "needs 4 ranks but 3 may be used"),
        ("R(1)V(1)D(4)", [0, 1, 2, 9], r"ranks \[9\] are not in the topology"),
        ("R(1)V(1)D(2)", [0, 1, 1], "given twice"),
        ("R(1)V(1)D(2,2)", None, "splits 2 dims"),
    ],
)
def test_invalid_ranks_or_counts_raise_layout_error(
    rvd: str, ranks: list[int] | None, match: str
) -> None:
    with pytest.raises(rv.LayoutError, match=match):
        rv.best_ranks(rv.Layout((8,), "R(1)V(1)D(4)"), rvd, levels(4), ranks=ranks)


def test_import_of_rvdcomm_does_not_import_scipy() -> None:
    code = "import rvdcomm, sys; assert 'scipy' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize(
    "src, dst",
    [
        ("R(1)V(1)D(32,32)", "R(1)V(1)D(1024,1)"),
        ("R(1)V(1)D(1024,1)", "R(1)V(1)D(1,1024)"),
        ("R(32)V(1)D(32,1)", "R(32)V(1)D(1,32)"),
    ],
)
def test_best_ranks_of_1024_ranks_take_less_than_5_seconds(src: str, dst: str) -> None:
    shape, ranks = (5127, 3061), random.Random(0).sample(range(1024), 1024)
    layout, topology = rv.Layout(shape, src, ranks), rv.Topology.preset("dgx-h100", 128, 8)
    start = time.process_time()
    rv.best_ranks(layout, dst, topology)
    # Processor time; 0.3 s on an idle core.
    assert time.process_time() - start < 5


def test_a_network_counts_by_the_levels_that_resemble_it() -> None:
    hosts = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(0, 8.0), rv.Link(0, 1.0))
    network = rv.Network.hosts([range(4), range(4, 8)], rv.Link(0, 8.0), rv.Link(0, 1.0), 1)
    src = rv.Layout((8, 8), "R(1)V(1)D(8,1)", [0, 4, 1, 5, 2, 6, 3, 7])
    for rvd in ("R(1)V(1)D(2,4)", "R(2)V(1)D(1,4)"):
        assert network.levels is None
        assert rv.best_ranks(src, rvd, network) == rv.best_ranks(src, rvd, hosts)
