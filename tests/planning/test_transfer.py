"""Laws of transfers: where the closed form applies, it equals the counted cost."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

import pytest

import rvdcomm as rv
from rvdcomm.layout import Layout
from rvdcomm.network import Level
from rvdcomm.planning.binding import Binding
from rvdcomm.planning.candidates import candidate_paths
from rvdcomm.planning.estimate import Estimator
from rvdcomm.planning.path import State, exchange_step
from rvdcomm.planning.transfer import transfer
from tests.oracle import all_rvds

LINKS = [rv.Link(3.0, 8.0), rv.Link(50.0, 4.0), rv.Link(200.0, 1.0)]


def levels(num_ranks: int, *sizes: int) -> rv.Topology:
    """Ranks in runs of these sizes, one level each."""
    groups = [
        tuple(tuple(range(i, i + size)) for i in range(0, num_ranks, size)) for size in (1, *sizes)
    ]
    names = ("rank", "host", "rack")
    return rv.Topology(tuple(map(Level, names[: len(groups)], groups, LINKS)))


WORLDS = {
    "4 to 4": (4, 4, levels(8)),
    "4 to 8": (4, 8, levels(12)),
    "8 to 4": (8, 4, levels(12)),
    "hosts of 2": (4, 4, levels(8, 2)),
    "hosts of 4": (4, 8, levels(12, 4)),
    "one host": (4, 4, levels(8, 8)),
    "racks of 4": (8, 4, levels(12, 2, 4)),
    "6 to 4": (6, 4, levels(10, 2)),
}


def ends_of(
    shape: tuple[int, ...], num_src: int, num_dst: int, topology: rv.Topology
) -> Iterator[tuple[Layout | Binding, Layout | Binding]]:
    """The two sides of every transfer that is a candidate for some pair."""
    for src, dst in product(all_rvds(num_src, 2), all_rvds(num_dst, 2)):
        ends = rv.Layout(shape, src), rv.Layout(shape, dst, range(num_src, num_src + num_dst))
        for path in candidate_paths(*ends, 1, topology):
            step = next(step for step in path.steps if step.direct)
            yield step.src.source, step.dst.source


@pytest.mark.many(4)
@pytest.mark.parametrize("num_src, num_dst, topology", WORLDS.values(), ids=WORLDS)
def test_closed_form_equals_the_counted_cost(
    num_src: int, num_dst: int, topology: rv.Topology
) -> None:
    wrong = []
    for src, dst in ends_of((48, 48), num_src, num_dst, topology):
        found = transfer(src, dst, 1, topology)
        counted = Estimator(topology, 1).counted(exchange_step(State(src), State(dst)))
        priced = found and (found.secs, found.rounds)
        if priced is not None and priced != pytest.approx(counted, rel=1e-12):
            wrong.append(f"{State(src).text} -> {State(dst).text}: {priced}, counted {counted}")
    assert wrong == []


@pytest.mark.parametrize("world", [name for name in WORLDS if "6" not in name])
def test_closed_form_exists_for_powers_of_two_without_dst_parts(world: str) -> None:
    # With dst parts, pieces may be slices of other slices. Such strided pieces are counted.
    topology = WORLDS[world][-1]
    uncovered = [
        f"{State(src).text} -> {State(dst).text}"
        for src, dst in ends_of((64, 64), *WORLDS[world])
        if "V(1)" in State(dst).text and transfer(src, dst, 1, topology) is None
    ]
    assert uncovered == []


@pytest.mark.parametrize(
    "src_ranks, dst_ranks, topology",
    [
        (range(4), range(2, 6), levels(8)),
        (range(3), range(3, 6), levels(8, 2)),
        ([3, 2, 1, 0], range(4, 8), levels(8)),
    ],
    ids=["overlap", "a host in common", "another order"],
)
def test_overlap_shared_host_or_other_rank_order_has_no_closed_form(
    src_ranks: range, dst_ranks: range, topology: rv.Topology
) -> None:
    src = rv.Layout((12,), rv.RVD(1, 1, (len(src_ranks),)), src_ranks)
    dst = rv.Layout((12,), rv.RVD(1, 1, (len(dst_ranks),)), dst_ranks)
    assert transfer(src, dst, 1, topology) is None
