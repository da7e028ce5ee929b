"""Laws of probes: all groups of a level work at once, and every message crosses that level."""

from __future__ import annotations

import pytest

import rvdcomm as rv
from rvdcomm.calibration.probes import Probe, probes, rounds_and_port_bytes
from rvdcomm.cost import step_cost

LINK = rv.Link(1e-5, 1e9)
HOSTS = rv.Topology.hosts([range(3), range(3, 6), range(6, 8)], LINK, LINK)
RACKS = rv.Topology(
    (
        rv.Level("rank", tuple((rank,) for rank in range(8)), LINK),
        rv.Level("host", ((0, 1), (2, 3), (4, 5), (6, 7)), LINK),
        rv.Level("rack", ((0, 1, 2, 3), (4, 5, 6, 7)), LINK),
    )
)
ONE_HOST = rv.Topology.single_host(3, 1e-5, 1e9)
SINGLE_RANKS = rv.Topology.single_host(2, 1e-5, 1e9)
ALL = {"hosts": HOSTS, "racks": RACKS, "one host": ONE_HOST, "single ranks": SINGLE_RANKS}
CASES = [
    pytest.param(topology, probe, id=f"{name} {probe.level} {probe.kind.name}")
    for name, topology in ALL.items()
    for probe in probes(topology)
]


def pairs_of(probe: Probe, topology: rv.Topology) -> dict[tuple[int, int], int]:
    """Number of elements from rank to rank, over all sets of the probe."""
    return {
        pair: count
        for i in range(len(probe.ends))
        for collective in probe.plan(i, 1 << 16, topology).program.collectives
        for pair, count in collective.traffic().items()
        if pair[0] != pair[1] and count
    }


@pytest.mark.parametrize("topology, probe", CASES)
def test_a_probe_crosses_its_level_and_no_other(topology: rv.Topology, probe: Probe) -> None:
    """By one step on each of its sets, which have no rank in common."""
    distances = {topology.distance(a, b) for a, b in pairs_of(probe, topology)}
    assert distances == {probe.level + 1}
    ranks = [rank for src, dst in probe.ends for rank in {*src, *dst}]
    assert len(ranks) == len(set(ranks)) > 0
    assert all((probe.place_of(rank) is None) == (rank not in ranks) for rank in topology.ranks)
    for i in range(len(probe.ends)):
        assert len(probe.plan(i, 1 << 16, topology).path.steps) == 1


@pytest.mark.parametrize("topology, probe", CASES)
def test_rounds_and_port_bytes_agree_with_the_cost_model(
    topology: rv.Topology, probe: Probe
) -> None:
    made = probe.plan(0, 1 << 16, topology)
    rounds, port_bytes = rounds_and_port_bytes(made, probe.level)
    links = [rv.Link(1e-3, 1e9)] * len(topology.levels)
    links[probe.level] = rv.Link(1e-3, 1e3)
    levels = zip(topology.levels, links, strict=True)
    slow = rv.Topology(tuple(rv.Level(level.name, level.groups, link) for level, link in levels))
    traffic = {
        pair: 4 * count
        for collective in made.program.collectives
        for pair, count in collective.traffic().items()
    }
    assert step_cost(traffic, slow, rounds).secs == pytest.approx(1e-3 * rounds + port_bytes / 1e3)


def test_probes_inside_hosts_use_all_hosts_and_pairs_omit_an_odd_host() -> None:
    kinds = {probe.kind.name: probe for probe in probes(HOSTS)}
    assert kinds["all_gather"].ends == (((0, 1, 2),) * 2, ((3, 4, 5),) * 2, ((6, 7),) * 2)
    assert kinds["transfer"].ends == (((0, 1, 2), (3, 4, 5)),)


@pytest.mark.parametrize("num_bytes", [1, 4096, 10**6])
def test_probe_tensors_have_about_the_requested_size_and_even_shards(num_bytes: int) -> None:
    for probe in probes(HOSTS):
        made = probe.plan(0, num_bytes, HOSTS)
        assert made.src.is_even
        assert made.dst.is_even
        side = made.src.shape[0]
        assert abs(4 * side**2 - num_bytes) <= 4 * (2 * side + 6) * 6
