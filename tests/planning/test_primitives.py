"""Laws of rebinds: names by pattern, and closed-form costs equal to counted ones."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fractions import Fraction
from itertools import pairwise

import pytest

import rvdcomm as rv
from rvdcomm.planning.binding import Binding, R, V, refine
from rvdcomm.planning.exchange import Move
from rvdcomm.planning.path import State, Step
from rvdcomm.planning.primitives import MOVES_NOTHING, RebindPricer, kind_of_rebind
from rvdcomm.planning.search import cheapest_rebinds
from tests.oracle import all_pairs

KINDS = {
    *("all_gather", "all_to_all", "all_reduce", "reduce_scatter", "slice", "mask"),
    *("permute", "exchange", "transfer", "local"),
}
"""The kinds that docs/primitives.md names."""

SHAPE = (16, 24)
NUM_BYTES = 16 * 24
ONE_HOST = rv.Topology.single_host(8, 0, 1.0)
TWO_HOSTS = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(0, 4.0), rv.Link(0, 1.0))
FOUR_HOSTS = rv.Topology.hosts(
    [range(h, h + 2) for h in range(0, 8, 2)], rv.Link(0, 4.0), rv.Link(0, 1.0)
)
TOPOLOGIES = {"8": ONE_HOST, "2x4": TWO_HOSTS, "4x2": FOUR_HOSTS}


def pair_of(src: str, dst: str, topology: rv.Topology = ONE_HOST) -> tuple[Binding, Binding]:
    pair = refine(rv.Layout(SHAPE, src), rv.Layout(SHAPE, dst), topology)
    assert pair is not None
    return pair


# --- names --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "src, dst, kind",
    [
        ((0, 1), (0, 1), "local"),
        ((0, 1), (R, 1), "all_gather"),
        ((0, 1), (R, R), "all_gather"),
        ((0, 1), (0, 2), "all_to_all"),
        ((0, 1), (2, 3), "all_to_all"),
        ((V, 1), (R, 1), "all_reduce"),
        ((V, V), (R, R), "all_reduce"),
        ((V, 1), (0, 1), "reduce_scatter"),
        ((V, V), (0, 1), "reduce_scatter"),
        ((R, 1), (0, 1), "slice"),
        ((R, 1), (V, 1), "mask"),
        ((0, 1), (V, 1), "mask"),
        ((0, R), (V, V), "mask"),
        ((0, 1), (1, 0), "permute"),
        ((0, 1, 2), (1, 2, 0), "permute"),
        ((0, R), (R, 0), "permute"),
        ((V, 0), (0, V), "permute"),
        ((0, 1), (1, 2), "exchange"),
        ((0, 1), (R, 0), "exchange"),
        ((0, V), (R, R), "exchange"),
        ((V, R), (0, 1), "exchange"),
        ((V, 0), (R, V), "exchange"),
    ],
)
def test_kind_of_a_rebind_follows_from_its_changed_axes(
    src: tuple[int, ...], dst: tuple[int, ...], kind: str
) -> None:
    assert kind_of_rebind(src, dst) == kind


# --- groups -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dst, groups",
    [
        ("R(2)V(1)D(2,2)", ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("R(2)V(2)D(1,2)", ((0, 2, 4, 6), (1, 3, 5, 7))),
        ("R(8)V(1)D(1,1)", (tuple(range(8)),)),
    ],
)
def test_ranks_of_a_group_differ_only_in_the_changed_axes(
    dst: str, groups: tuple[tuple[int, ...], ...]
) -> None:
    # R(1)V(2)D(2,2) has the axes V, dim 0, dim 1 of strides 4, 2, 1.
    assert Step("", *map(State, pair_of("R(1)V(2)D(2,2)", dst))).groups == groups


# --- bytes --------------------------------------------------------------------------------------


def direct(src: Binding, dst: Binding, pricer: RebindPricer) -> list[tuple[Binding, Binding]]:
    """The step from one to the other, if it has a closed-form cost."""
    enters_v = any(t == V != s for s, t in zip(src.targets, dst.targets, strict=True))
    return [] if enters_v else [(src, dst)]


def found(src: Binding, dst: Binding, pricer: RebindPricer) -> list[tuple[Binding, Binding]]:
    """The steps of the cheapest path."""
    _, path = cheapest_rebinds(src, dst, pricer)
    return list(pairwise(path))


STEPS = {"direct": direct, "found": found}
Steps = Callable[[Binding, Binding, RebindPricer], list[tuple[Binding, Binding]]]


def moving_steps(
    topology: rv.Topology, steps: Steps
) -> Iterator[tuple[Binding, Binding, RebindPricer]]:
    """Steps that move bytes, of all pairs of 8 ranks."""
    for pair in all_pairs(SHAPE, 8):
        bindings = refine(*pair, topology)
        assert bindings is not None
        pricer = RebindPricer(bindings[0].grid, topology, NUM_BYTES)
        for src, dst in steps(*bindings, pricer):
            if kind_of_rebind(src.targets, dst.targets) not in MOVES_NOTHING:
                yield src, dst, pricer


def counted_moves(src: Binding, dst: Binding, topology: rv.Topology) -> tuple[Move, ...]:
    kind = kind_of_rebind(src.targets, dst.targets)
    (moves,) = Step(kind, State(src), State(dst)).moves(topology)
    return moves


def busiest_inbound(moves: tuple[Move, ...], topology: rv.Topology) -> list[int]:
    """Elements into the busiest group of every level."""
    busiest = []
    for home in topology.homes:
        into: dict[int, int] = {}
        for move in moves:
            if home[move.src_rank] != home[move.dst_rank]:
                to = home[move.dst_rank]
                into[to] = into.get(to, 0) + move.box.num_elements
        busiest.append(max(into.values(), default=0))
    return busiest


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_priced_port_bytes_equal_the_counted_bytes_of_the_busiest_groups(
    topology: rv.Topology, steps: Steps
) -> None:
    wrong = []
    for src, dst, pricer in moving_steps(topology, steps):
        counted = busiest_inbound(counted_moves(src, dst, topology), topology)
        # Elements are bytes here; the formula counts 64ths of a byte.
        priced = [n / 64 for n in pricer.port_bytes(src.targets, dst.targets)]
        if priced != counted:
            wrong.append(f"{src} -> {dst}: priced {priced}, counted {counted}")
    assert wrong == []


@pytest.mark.parametrize("topology", TOPOLOGIES.values(), ids=TOPOLOGIES)
@pytest.mark.parametrize("steps", STEPS.values(), ids=STEPS)
def test_rounds_are_the_partners_of_the_busiest_rank(topology: rv.Topology, steps: Steps) -> None:
    wrong = []
    for src, dst, pricer in moving_steps(topology, steps):
        pairs = {(m.src_rank, m.dst_rank) for m in counted_moves(src, dst, topology)}
        ends = [end for a, b in pairs if a != b for end in ((a, "out"), (b, "in"))]
        counted = max((ends.count(end) for end in set(ends)), default=0)
        _, priced = pricer.ticks(src.targets, dst.targets)
        # Replicas that leave R may share the work; the price is then a lower bound.
        shared = any(s == R != t for s, t in zip(src.targets, dst.targets, strict=True))
        if priced > counted or (priced < counted and not shared):
            wrong.append(f"{src} -> {dst}: priced {priced}, counted {counted}")
    assert wrong == []


def received_by_each(src: str, dst: str) -> Fraction:
    """What a rank receives in the direct step, in shards of ``src``."""
    pair = pair_of(src, dst)
    pricer = RebindPricer(pair[0].grid, ONE_HOST, NUM_BYTES)
    num_bytes = Fraction(pricer.port_bytes(pair[0].targets, pair[1].targets)[0], 64)
    return num_bytes / pair[0].largest_shard


# Source: docs/bound.md, "Sources". n = elements of the input shard, group of k: all-gather (k-1)n;
# all-to-all and reduce-scatter (k-1)/k n.
@pytest.mark.parametrize(
    "src, dst, shards",
    [
        ("R(1)V(1)D(8,1)", "R(8)V(1)D(1,1)", 7),
        ("R(2)V(1)D(4,1)", "R(8)V(1)D(1,1)", 3),
        ("R(1)V(1)D(8,1)", "R(1)V(1)D(1,8)", Fraction(7, 8)),
        ("R(2)V(1)D(4,1)", "R(2)V(1)D(1,4)", Fraction(3, 4)),
        ("R(1)V(8)D(1,1)", "R(1)V(1)D(8,1)", Fraction(7, 8)),
        ("R(2)V(4)D(1,1)", "R(2)V(1)D(1,4)", Fraction(3, 4)),
        ("R(4)V(1)D(1,2)", "R(1)V(1)D(4,2)", 0),
    ],
)
def test_common_collectives_receive_the_volumes_of_ring_algorithms(
    src: str, dst: str, shards: Fraction | int
) -> None:
    assert received_by_each(src, dst) == shards


@pytest.mark.parametrize("k", [2, 4, 8])
def test_all_reduce_costs_a_reduce_scatter_and_an_all_gather(k: int) -> None:
    # Source: docs/bound.md, "Messages in all": 2(k-1)/k n.
    src, dst = pair_of(f"R(1)V({k})D({8 // k},1)", f"R({k})V(1)D({8 // k},1)")
    pricer = RebindPricer(src.grid, ONE_HOST, NUM_BYTES)
    ticks, _ = cheapest_rebinds(src, dst, pricer)
    assert pricer.secs(ticks) == 2 * (k - 1) / k * src.largest_shard


# --- ticks --------------------------------------------------------------------------------------


def test_ticks_are_alpha_times_rounds_and_the_busiest_port() -> None:
    topology = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(1e-6, 1e9), rv.Link(1e-3, 1e6))
    src, dst = pair_of("R(1)V(1)D(8,1)", "R(8)V(1)D(1,1)", topology)
    pricer = RebindPricer(src.grid, topology, 8000)
    ticks, rounds = pricer.ticks(src.targets, dst.targets)
    # Each rank of a host receives the 4 shards of 1000 bytes of the other host, over one NIC.
    assert (pricer.secs(ticks), rounds) == (7 * 1e-3 + 4 * 4000 / 1e6, 7)


def test_ticks_of_a_step_inside_hosts_take_the_alpha_of_the_host() -> None:
    topology = rv.Topology.hosts([range(4), range(4, 8)], rv.Link(2.0**-20, 2.0**30), rv.Link(1, 1))
    src, dst = pair_of("R(2)V(1)D(4,1)", "R(8)V(1)D(1,1)", topology)
    pricer = RebindPricer(src.grid, topology, 4096)
    ticks, rounds = pricer.ticks(src.targets, dst.targets)
    assert (pricer.secs(ticks), rounds) == (3 * 2.0**-20 + 3 * 1024 / 2.0**30, 3)


@pytest.mark.parametrize(
    "src, dst",
    [
        ("R(8)V(1)D(1,1)", "R(1)V(1)D(8,1)"),
        ("R(8)V(1)D(1,1)", "R(1)V(8)D(1,1)"),
        ("R(1)V(1)D(1,8)", "R(1)V(8)D(1,1)"),
        ("R(2)V(2)D(2,1)", "R(2)V(2)D(2,1)"),
    ],
)
def test_steps_that_move_nothing_cost_nothing(src: str, dst: str) -> None:
    pair = pair_of(src, dst)
    pricer = RebindPricer(pair[0].grid, rv.Topology.single_host(8, 1.0, 1.0), NUM_BYTES)
    assert pricer.ticks(pair[0].targets, pair[1].targets) == (0, 0)


def test_exchange_into_parts_has_no_closed_form_cost() -> None:
    src, dst = pair_of("R(1)V(1)D(2,4)", "R(4)V(2)D(1,1)")
    pricer = RebindPricer(src.grid, ONE_HOST, NUM_BYTES)
    with pytest.raises(rv.LayoutError, match="no closed-form cost for exchange into V"):
        pricer.ticks(src.targets, dst.targets)


def test_cost_at_infinite_bandwidth_is_the_latency_of_its_rounds() -> None:
    topology = rv.Topology.single_host(8, 2.0**-10, float("inf"))
    src, dst = pair_of("R(1)V(1)D(8,1)", "R(8)V(1)D(1,1)", topology)
    pricer = RebindPricer(src.grid, topology, NUM_BYTES)
    assert pricer.secs(pricer.ticks(src.targets, dst.targets)[0]) == 7 * 2.0**-10
