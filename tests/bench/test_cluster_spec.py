"""Tests of ``bench.cluster.spec``: rates, names, addresses and commands of a cluster."""

from __future__ import annotations

import math

import pytest

from bench.cluster.spec import (
    ClusterSpec,
    ShapedLink,
    build_commands,
    owner_pid,
    parse_rate,
    parse_rates,
    rank_env,
    remove_commands,
)

SPEC = ClusterSpec(hosts=3, ranks_per_host=2, rate_bits_per_sec=200e6, pid=4711, serial=5)


@pytest.mark.parametrize(
    ("text", "bits_per_sec"),
    [
        ("200mbit", 200e6),
        ("1.5Gbit", 1.5e9),
        (".5kbit", 500.0),
        ("3kibit", 3 * 1024.0),
        ("25mbps", 200e6),
        ("1gibps", 8 * 1024.0**3),
        ("3bps", 24.0),
        ("64000", 64e3),
        (" 5mbit ", 5e6),
    ],
)
def test_parse_rate_reads_the_notation_of_tc(text: str, bits_per_sec: float) -> None:
    assert parse_rate(text) == bits_per_sec


@pytest.mark.parametrize(
    "text", ["", "mbit", "-1mbit", "5m", "5 mbit", "5mbit/s", "1e6", "50%", "0mbit"]
)
def test_parse_rate_rejects_invalid_text(text: str) -> None:
    with pytest.raises(ValueError, match=r"cannot parse rate|rate '0mbit' is zero"):
        parse_rate(text)


@pytest.mark.parametrize(
    ("hosts", "ranks_per_host", "rate", "message"),
    [
        (0, 1, 1e6, "hosts=0; a cluster has 1 to 254 hosts"),
        (255, 1, 1e6, "hosts=255; a cluster has 1 to 254 hosts"),
        (2, 0, 1e6, "ranks_per_host=0; a host has at least 1 rank"),
        (2, 1, 99e3, "a link carries at least 100000, for example 200e6"),
        (2, 1, float("nan"), "a link carries at least"),
        (2, 1, (1e6, 99e3), "a link carries at least"),
        (3, 1, (1e6, 2e6), "2 rates for 3 hosts; give one for each"),
    ],
)
def test_spec_rejects_numbers_out_of_range(
    hosts: int, ranks_per_host: int, rate: float | tuple[float, ...], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSpec(hosts, ranks_per_host, rate, pid=1)


def test_every_build_command_names_a_namespace_of_the_spec() -> None:
    for command in build_commands(SPEC):
        named = [word for word in command if owner_pid(word)]
        assert named, command
        assert set(named) <= set(SPEC.namespaces)
    assert {owner_pid(name) for name in SPEC.namespaces} == {SPEC.pid}
    foreign = "docker", "rvd-x-0-host1", "rvd-1-host1", "my-rvd-1-0-host1"
    assert [owner_pid(name) for name in foreign] == [None] * 4


def test_namespaces_are_removed_in_reverse_order_of_creation() -> None:
    built = [c[-1] for c in build_commands(SPEC) if c[:3] == ["ip", "netns", "add"]]
    removed = [c[-1] for c in remove_commands(SPEC)]
    assert built == removed[::-1] == SPEC.namespaces


def test_every_link_is_shaped_in_both_directions() -> None:
    shaped = [(c[2], c[6]) for c in build_commands(SPEC) if c[0] == "tc"]
    assert shaped == [
        ("rvd-4711-5-host0", "eth0"),
        ("rvd-4711-5-switch", "port0"),
        ("rvd-4711-5-host1", "eth0"),
        ("rvd-4711-5-switch", "port1"),
        ("rvd-4711-5-host2", "eth0"),
        ("rvd-4711-5-switch", "port2"),
    ]


@pytest.mark.parametrize(
    ("rate_bits_per_sec", "burst_bytes", "queue_secs"),
    [(5e6, 4 * 1514, 262144 * 8 / 5e6), (200e6, 25_000, 0.1), (2e9, 250_000, 0.1)],
)
def test_burst_and_queue_have_a_minimum_at_low_rates(
    rate_bits_per_sec: float, burst_bytes: int, queue_secs: float
) -> None:
    link = ShapedLink(rate_bits_per_sec)
    assert (link.burst_bytes, link.queue_secs) == (burst_bytes, queue_secs)


@pytest.mark.parametrize("rate_bits_per_sec", [1e5, 20e6, 200e6, 500e6, 1e9, 10e9])
def test_largest_segment_with_its_headers_fits_in_a_burst(rate_bits_per_sec: float) -> None:
    spec = ClusterSpec(2, 1, rate_bits_per_sec, pid=1)
    link = spec.links[0]
    frames = math.ceil(link.segment_bytes / 1448)
    assert link.segment_bytes + frames * (1514 - 1448) <= link.burst_bytes
    said = [c for c in build_commands(spec) if "gso_max_size" in c]
    assert [(c[2], c[-1]) for c in said] == [
        (spec.namespace(host), str(link.segment_bytes)) for host in range(2)
    ]


def test_each_host_is_shaped_to_its_own_rate_in_both_directions() -> None:
    spec = ClusterSpec(2, 1, parse_rates("400mbit/100mbit"), pid=1)
    shaped = [(c[6], c[c.index("rate") + 1]) for c in build_commands(spec) if c[0] == "tc"]
    fast, slow = "400000000bit", "100000000bit"
    assert shaped == [("eth0", fast), ("port0", fast), ("eth0", slow), ("port1", slow)]


def test_hosts_on_a_line_forward_over_their_neighbours() -> None:
    spec = ClusterSpec(4, 1, 1e9, pid=1, wires=((0, 1), (1, 2), (2, 3)))
    assert spec.next_hops[0] == {1: 1, 2: 1, 3: 1}
    assert spec.next_hops[2] == {1: 1, 3: 3, 0: 1}
    assert spec.namespaces == [f"rvd-1-0-host{host}" for host in range(4)]
    commands = [" ".join(command) for command in build_commands(spec)]
    assert sum(command.startswith("tc ") for command in commands) == 6
    routes = [command for command in commands if "host0 route" in command]
    assert routes == [
        "ip -n rvd-1-0-host0 route add 10.213.0.2/32 dev to1 src 10.213.0.1",
        "ip -n rvd-1-0-host0 route add 10.213.0.3/32 via 10.213.0.2 dev to1 src 10.213.0.1",
        "ip -n rvd-1-0-host0 route add 10.213.0.4/32 via 10.213.0.2 dev to1 src 10.213.0.1",
    ]


def test_hosts_on_a_ring_take_the_shorter_way() -> None:
    spec = ClusterSpec(4, 1, 1e9, pid=1, wires=((0, 1), (1, 2), (2, 3), (3, 0)))
    assert spec.next_hops[0] == {1: 1, 3: 3, 2: 1}


def test_ranks_of_a_host_have_a_nic_each_or_share_them() -> None:
    spec = ClusterSpec(2, 4, 1e9, pid=1, nics=2)
    assert [rank_env(spec, rank)["GLOO_SOCKET_IFNAME"] for rank in range(8)] == [
        *("eth0", "eth0", "eth1", "eth1"),
    ] * 2
    shaped = [c for c in build_commands(spec) if c[0] == "tc"]
    assert len(shaped) == 8
    assert len({spec.address(host, nic) for host in range(2) for nic in range(2)}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nics": 3}, "nics=3; a host has 1 to ranks_per_host"),
        ({"nics": 0}, "nics=0"),
        ({"wires": ((0, 1),)}, "have to connect all hosts"),
        ({"wires": ((0, 1), (1, 2)), "nics": 2}, "leave no NICs"),
    ],
)
def test_wires_and_nics_that_make_no_cluster_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSpec(3, 2, 1e9, pid=1, **changes)  # type: ignore[arg-type]


def test_addresses_of_254_hosts_are_distinct_and_below_the_broadcast_address() -> None:
    spec = ClusterSpec(254, 1, 1e9, pid=1)
    addresses = {spec.address(host) for host in range(254)}
    assert len(addresses) == 254
    assert "10.213.0.254" in addresses
    assert "10.213.0.255" not in addresses


def test_rank_env_of_a_middle_rank() -> None:
    assert rank_env(SPEC, 3) == {
        "RANK": "3",
        "WORLD_SIZE": "6",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "1",
        "MASTER_ADDR": "10.213.0.1",
        "MASTER_PORT": "29500",
        "GLOO_SOCKET_IFNAME": "eth0",
        "OMP_NUM_THREADS": "1",
    }
