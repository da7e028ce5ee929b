"""The bound on rounds: of collectives what is known, on networks the way between ranks."""

from __future__ import annotations

import pytest

import rvdcomm as rv
from rvdcomm.cost.rounds import least_rounds


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 9, 16])
@pytest.mark.parametrize(
    ("src", "dst"),
    [
        ("R(1)V(1)D({n},1)", "R({n})V(1)D(1,1)"),
        ("R(1)V({n})D(1,1)", "R(1)V(1)D({n},1)"),
        ("R(1)V({n})D(1,1)", "R({n})V(1)D(1,1)"),
        ("R(1)V(1)D({n},1)", "R(1)V(1)D(1,{n})"),
    ],
    ids=["gather", "scatter of sums", "all-reduce", "transpose"],
)
def test_all_ranks_need_something_of_all(count: int, src: str, dst: str) -> None:
    shape = count, count
    pair = (rv.Layout(shape, text.format(n=count)) for text in (src, dst))
    assert least_rounds(*pair) == (count - 1).bit_length()


@pytest.mark.parametrize(
    ("src", "dst", "rounds"),
    [
        # From one rank to seven others: each round doubles those who know anything of it.
        ("R(1)V(1)D(1) shape(8) ranks(0)", "R(8)V(1)D(1) shape(8)", 3),
        ("R(1)V(1)D(1) shape(8) ranks(0)", "R(1)V(1)D(8) shape(8)", 3),
        ("R(1)V(1)D(1) shape(8) ranks(0)", "R(1)V(1)D(2) shape(8) ranks(4,5)", 2),
        # Two have it: six more take two doublings.
        ("R(2)V(1)D(1) shape(8) ranks(0,1)", "R(8)V(1)D(1) shape(8)", 2),
        # To one rank from four, of which pairs hold the same.
        ("R(2)V(1)D(2) shape(8) ranks(0:4)", "R(1)V(1)D(1) shape(8) ranks(5)", 2),
        ("R(1)V(4)D(1) shape(8) ranks(0:4)", "R(1)V(1)D(1) shape(8) ranks(5)", 3),
        # Nothing moves; empty shards need nothing; parts of dst are free.
        ("R(1)V(1)D(2) shape(8)", "R(1)V(1)D(2) shape(8)", 0),
        ("R(1)V(1)D(2) shape(1)", "R(1)V(1)D(2) shape(1)", 0),
        ("R(1)V(1)D(2) shape(0)", "R(2)V(1)D(1) shape(0)", 0),
        ("R(1)V(1)D(1) shape(8) ranks(0)", "R(1)V(4)D(1) shape(8)", 0),
    ],
)
def test_known_pairs(src: str, dst: str, rounds: int) -> None:
    assert least_rounds(rv.Layout.parse(src), rv.Layout.parse(dst)) == rounds


def test_the_bound_has_a_latency_for_each_round() -> None:
    src, dst = rv.Layout((8,), "R(1)V(1)D(8)"), rv.Layout((8,), "R(8)V(1)D(1)")
    plan = rv.plan(src, dst, "int64", rv.Topology.single_host(8, 1.0, 1e9), executor="dist")
    assert (plan.bound.rounds, plan.cost.rounds) == (3, 3)
    assert plan.gap == pytest.approx(1.0)


def test_a_message_takes_as_long_as_its_way() -> None:
    line = rv.Network.preset("line", 5, link=rv.Link(1.0, 1e9))
    src, dst = (rv.Layout((8,), "R(1)V(1)D(1)", [rank]) for rank in (0, 4))
    plan = rv.plan(src, dst, "int64", line)
    assert plan.bound.rounds == 1
    assert plan.bound.secs == pytest.approx(4.0)
    assert plan.gap == pytest.approx(1.0)
