"""Laws of comparing hosts: rates of few pairs give back the rates of hosts that made them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest

import rvdcomm as rv
from rvdcomm.calibration.hosts import (
    ALL_EQUAL,
    INSIDE,
    INTO,
    OUT,
    HostRates,
    SlowPair,
    Way,
    compared,
    next_pairs,
    with_rates,
)
from rvdcomm.calibration.report import differences

FAST, SLOW = 400e6, 100e6


def visits(
    out: Sequence[float],
    into: Sequence[float],
    noise: Callable[[], float] = lambda: 1.0,
) -> list[dict[tuple[int, int], float]]:
    """The rates of the pairs that are asked for, as a measurement gives them, round by round."""
    known: dict[tuple[int, int], float] = {}
    rounds = []
    while pairs := next_pairs(range(len(out)), known):
        ends = [*pairs, *((b, a) for a, b in pairs)]
        rounds.append({(a, b): min(out[a], into[b]) * noise() for a, b in ends})
        known |= rounds[-1]
    return rounds


def pairs_of(out: Sequence[float], into: Sequence[float]) -> dict[tuple[int, int], float]:
    return {pair: rate for rates in visits(out, into) for pair, rate in rates.items()}


def hosts_of(num_hosts: int, size: int = 1) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(h * size, (h + 1) * size)) for h in range(num_hosts))


def found(out: Sequence[float], into: Sequence[float]) -> HostRates:
    return compared(hosts_of(len(out)), pairs_of(out, into))


def slow_in(rates: Sequence[float]) -> tuple[tuple[int, float], ...]:
    return tuple((host, rate) for host, rate in enumerate(rates) if rate != FAST)


# --- which pairs --------------------------------------------------------------------------------


@pytest.mark.parametrize("num_hosts", range(1, 20))
def test_pairs_of_a_round_are_disjoint_and_no_pair_comes_twice(num_hosts: int) -> None:
    rounds = visits([FAST] * num_hosts, [FAST] * num_hosts)
    for pairs in rounds:
        hosts = [host for pair in pairs for host in pair]
        assert max(map(hosts.count, hosts)) == 2  # Once as the sender and once as the receiver.
    met = [pair for pairs in rounds for pair in pairs]
    assert len(set(met)) == len(met)


@pytest.mark.parametrize("num_hosts", [2, 3, 4])
def test_up_to_four_hosts_all_meet(num_hosts: int) -> None:
    met = {pair for pairs in visits([FAST] * num_hosts, [FAST] * num_hosts) for pair in pairs}
    assert met == {pair for pair in product(range(num_hosts), repeat=2) if pair[0] != pair[1]}


@pytest.mark.parametrize("num_slow", [0, 1, 7, 32, 60])
@pytest.mark.parametrize("num_hosts", [64])
def test_rounds_of_64_hosts_are_at_most_ten(num_hosts: int, num_slow: int) -> None:
    """Seven of the tournament, and three in which slow hosts meet the fastest quarter."""
    rates = [SLOW] * num_slow + [FAST] * (num_hosts - num_slow)
    assert 7 <= len(visits(rates, rates)) <= 10


# --- what they say ------------------------------------------------------------------------------


@pytest.mark.parametrize("num_hosts", range(3, 9))
def test_slow_hosts_are_found_if_they_are_at_most_half(num_hosts: int) -> None:
    """Every choice of them."""
    for rates in product([FAST, SLOW], repeat=num_hosts):
        if rates.count(FAST) >= 2 and 2 * rates.count(SLOW) <= num_hosts:
            result = found(rates, rates)
            assert result.ways == (Way(OUT, FAST, slow_in(rates)), Way(INTO, FAST, slow_in(rates)))
            assert not result.unsure
            assert not result.slow_paths


@pytest.mark.parametrize("num_hosts", range(3, 6))
def test_slow_directions_are_found_if_few_hosts_have_them(num_hosts: int) -> None:
    """Every choice of hosts that send slowly and hosts that receive slowly."""
    most = (num_hosts - 1) // 2
    for out, into in product(product([FAST, SLOW], repeat=num_hosts), repeat=2):
        num_fast = sum(a == b == FAST for a, b in zip(out, into, strict=True))
        if num_fast >= 2 and max(out.count(SLOW), into.count(SLOW)) <= most:
            assert [way.others for way in found(out, into).ways] == [slow_in(out), slow_in(into)]


def test_slow_hosts_of_different_rates_have_each_its_own() -> None:
    rates = [FAST, 50e6, FAST, FAST, SLOW, FAST]
    assert found(rates, rates).ways[0] == Way(OUT, FAST, ((1, 50e6), (4, SLOW)))


def test_two_fast_hosts_among_slow_ones_are_found_if_they_meet() -> None:
    a, b = sorted(next_pairs(range(6), {})[0])
    rates = [FAST if host in (a, b) else SLOW for host in range(6)]
    assert found(rates, rates).ways[0] == Way(OUT, SLOW, ((a, FAST), (b, FAST)))


@pytest.mark.parametrize("num_hosts", [2, 3, 4, 8, 16, 64])
def test_noise_of_10_percent_makes_no_host_slow(num_hosts: int) -> None:
    """In one of 100 clusters at most: the limit is three deviations, and hosts are many."""
    random = np.random.default_rng(num_hosts)
    rates, hosts = [FAST] * num_hosts, hosts_of(num_hosts)
    noisy = [visits(rates, rates, lambda: random.normal(1, 0.1)) for _ in range(100)]
    all_pairs = [{p: r for of in rounds for p, r in of.items()} for rounds in noisy]
    wrong = [pairs for pairs in all_pairs if not compared(hosts, pairs, pair_noise=0.1).are_equal]
    assert len(wrong) <= 1


def test_one_slow_host_is_found_within_noise_of_10_percent() -> None:
    random = np.random.default_rng(0)
    rates = [FAST] * 5 + [SLOW] + [FAST] * 2
    rounds = visits(rates, rates, lambda: random.normal(1, 0.1))
    pairs = {pair: rate for of in rounds for pair, rate in of.items()}
    for way in compared(hosts_of(8), pairs, pair_noise=0.1).ways:
        ((host, rate),) = way.others
        assert (host, way.usual_bytes_per_sec) == (5, pytest.approx(FAST, rel=0.2))
        assert rate == pytest.approx(SLOW, rel=0.3)  # The best of four rates.


def test_one_host_has_nothing_to_compare() -> None:
    assert compared(hosts_of(1, 4), {}) == HostRates(hosts_of(1, 4))
    assert next_pairs([0], {}) == ()


def test_slow_direction_between_two_hosts_is_of_either_host() -> None:
    result = compared(hosts_of(2), {(0, 1): SLOW, (1, 0): FAST})
    assert result.unsure == (SlowPair(0, 1, SLOW, FAST),)
    assert [way.others for way in result.ways] == [((0, SLOW),), ((1, SLOW),)]
    (text,) = differences(result)
    assert "one of them is slow, and only pairs with further hosts could tell which" in text


def test_two_hosts_that_are_slow_both_ways_count_as_equal_and_the_report_says_why() -> None:
    result = compared(hosts_of(2), {(0, 1): SLOW, (1, 0): SLOW})
    assert result.are_equal
    text = "of two hosts, which one limits the rate between them cannot be told"
    assert list(differences(result)) == [text]


def test_slow_path_between_fast_hosts_is_no_slow_host() -> None:
    pairs = {**pairs_of([FAST] * 4, [FAST] * 4), (1, 3): SLOW}
    result = compared(hosts_of(4), pairs)
    assert result.are_equal
    assert result.slow_paths == (SlowPair(1, 3, SLOW, FAST),)
    (text,) = differences(result)
    assert text.startswith("host 1 (rank 1) sends to host 3 (rank 3) at 100 MB/s where both reach")


# --- inside hosts -------------------------------------------------------------------------------


def inside_of(*kinds: Sequence[float]) -> Way:
    rates = {str(i): dict(enumerate(of)) for i, of in enumerate(kinds)}
    (way,) = compared(hosts_of(len(kinds[0]), 2), {}, rates).ways
    return way


def test_host_that_is_slow_inside_in_all_kinds_is_found() -> None:
    assert inside_of([4e9, 4e9, 1e9], [2e9, 2e9, 0.5e9]) == Way(INSIDE, 3e9, ((2, 0.75e9),))


def test_host_that_is_slow_inside_in_one_kind_was_disturbed() -> None:
    assert inside_of([4e9, 4e9, 1e9], [2e9, 2e9, 2e9]).others == ()


# --- as a network -------------------------------------------------------------------------------

NEAR, FAR = rv.Link(20e-6, 3e9), rv.Link(60e-6, FAST)
HOSTS = rv.Topology.hosts(hosts_of(3, 2), NEAR, FAR)
WAYS = (
    Way(OUT, FAST, ((1, SLOW),)),
    Way(INTO, FAST, ((2, 50e6),)),
    Way(INSIDE, 3e9, ((0, 1e9),)),
)


def test_equal_hosts_keep_the_topology() -> None:
    assert with_rates(HOSTS, ALL_EQUAL) is HOSTS
    assert with_rates(HOSTS, found([FAST] * 3, [FAST] * 3)) is HOSTS


def test_each_rate_is_that_of_the_wires_which_bytes_pass() -> None:
    network = with_rates(HOSTS, HostRates(hosts_of(3, 2), WAYS))
    text = """\
0,1 <-> host0  20 us  1 GB/s
2,3 <-> host1  20 us  3 GB/s
4,5 <-> host2  20 us  3 GB/s
fabric <-> host0  60 us  400 MB/s
fabric -> host1  60 us  400 MB/s
fabric -> host2  60 us  50 MB/s
host1 -> fabric  60 us  100 MB/s
host2 -> fabric  60 us  400 MB/s"""
    assert network == rv.Network.parse(text)


def test_host_of_one_rank_has_the_rate_at_its_rank() -> None:
    topology = rv.Topology.single_host(3, 60e-6, FAST)
    network = with_rates(topology, HostRates(hosts_of(3), WAYS[:1]))
    assert isinstance(network, rv.Network)
    assert network.link(1, "fabric") == rv.Link(60e-6, SLOW)
    assert network.link("fabric", 1) == network.link(0, "fabric") == rv.Link(60e-6, FAST)


def test_hosts_in_racks_keep_the_ports_of_the_racks() -> None:
    rack = rv.Link(80e-6, 1e9)
    racks = rv.Level("rack", (tuple(range(4)), tuple(range(4, 8))), rack)
    topology = rv.Topology((*rv.Topology.hosts(hosts_of(4, 2), NEAR, FAR).levels, racks))
    network = with_rates(topology, HostRates(hosts_of(4, 2), WAYS[:1]))
    assert isinstance(network, rv.Network)
    assert network.link("host1", "rack0") == rv.Link(60e-6, SLOW)
    assert network.link("rack0", "fabric") == rack


def test_loaded_network_of_unequal_hosts_plans_around_the_slow_one(tmp_path: Path) -> None:
    slow = HostRates(hosts_of(3, 2), (Way(OUT, FAST, ((1, SLOW),)), Way(INTO, FAST)))
    with_rates(HOSTS, slow).save(tmp_path / "links.json", notes={"calibration": {}})
    loaded = rv.Network.load(tmp_path / "links.json")
    assert loaded == with_rates(HOSTS, slow)
    ends = rv.Layout((60, 60), "R(1)V(1)D(6,1)"), rv.Layout((60, 60), "R(6)V(1)D(1,1)")
    assert rv.plan(*ends, topology=loaded).cost.secs > rv.plan(*ends, topology=HOSTS).cost.secs


def test_report_names_the_host_its_ranks_and_both_rates() -> None:
    lines = list(differences(HostRates(hosts_of(3, 4), WAYS)))
    assert lines == [
        "host 1 (ranks 4:8) sends at 100 MB/s where the median host has 400 MB/s",
        "host 2 (ranks 8:12) receives at 50 MB/s where the median host has 400 MB/s",
        "host 0 (ranks 0:4) moves bytes inside at 1 GB/s where the median host has 3 GB/s",
    ]
