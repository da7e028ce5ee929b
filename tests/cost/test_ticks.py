"""Laws of ticks: the port model in whole numbers agrees with the port model in seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from math import inf

import pytest

import rvdcomm as rv
from rvdcomm.cost import PortSecs, PortTicks
from tests.oracle import random_topology

# The error of a rounded link is below a billionth; seconds have rounding errors, too.
REL = 1e-8


def cases(seed: int) -> Iterator[tuple[rv.Topology, list[int], int]]:
    """Topologies, bytes through the busiest port of every level, and rounds."""
    rng = random.Random(seed)
    for _ in range(100):
        topology = random_topology(rng)
        port_bytes = [rng.choice([0, 1, rng.randrange(10**12)]) for _ in topology.levels]
        yield topology, port_bytes, rng.randrange(1, 2000)


@pytest.mark.parametrize("parts", [1, 64])
@pytest.mark.parametrize("seed", range(4))
def test_ticks_agree_with_seconds(seed: int, parts: int) -> None:
    for topology, port_bytes, rounds in cases(seed):
        secs, ticks = PortSecs.of(topology), PortTicks.of(topology, parts)
        units = [parts * num_bytes for num_bytes in port_bytes]
        step, least = ticks.step(units, rounds), ticks.least(units, latency=0)
        assert step / ticks.a_sec == pytest.approx(secs.step(port_bytes, rounds), rel=REL)
        assert least / ticks.a_sec == pytest.approx(secs.least(port_bytes, latency=0.0), rel=REL)


@pytest.mark.parametrize("seed", range(4))
def test_step_is_never_below_the_lower_bound_of_its_bytes(seed: int) -> None:
    for topology, port_bytes, rounds in cases(seed):
        ports = PortTicks.of(topology)
        assert ports.step(port_bytes, rounds) >= ports.least(port_bytes, latency=0)


def test_link_figures_with_few_decimals_are_exact() -> None:
    topology = rv.Topology.single_host(4, 3e-6, 380e9)
    ports = PortTicks.of(topology)
    assert ports.step([380 * 10**9], rounds=1) * 10**6 == ports.a_sec * (10**6 + 3)


def test_alpha_of_a_level_with_infinite_bandwidth_is_counted() -> None:
    topology = rv.Topology.hosts([[0], [1]], rv.Link(0.0, 8.0), rv.Link(5.0, inf))
    assert PortSecs.of(topology).step([16, 16], rounds=2) == 2 * 5.0 + 2.0
