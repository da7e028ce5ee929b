"""Laws of presets: named clusters of two and three levels."""

from __future__ import annotations

from itertools import pairwise

import pytest

import rvdcomm as rv
from rvdcomm import cli
from rvdcomm.network.presets import PRESETS


@pytest.mark.parametrize("name", PRESETS)
def test_every_level_has_a_higher_latency_than_the_level_below(name: str) -> None:
    links = [level.link for level in rv.Topology.preset(name, 3, 2, 4).levels]
    assert all(below.alpha_secs < link.alpha_secs for below, link in pairwise(links))


@pytest.mark.parametrize("name", PRESETS)
def test_host_port_is_slower_per_rank_than_rank_port_and_slower_than_pod_port(name: str) -> None:
    rank, host, pod = (link.bytes_per_sec for link in PRESETS[name].links)
    assert host / PRESETS[name].ranks_per_host < rank
    assert host < pod


@pytest.mark.parametrize("name", PRESETS)
def test_two_counts_are_hosts_and_ranks_per_host(name: str) -> None:
    ports, hosts = rv.Topology.preset(name, 3, 4).levels
    assert ports.groups == tuple((rank,) for rank in range(12))
    assert hosts.groups == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 10, 11))


@pytest.mark.parametrize("name", PRESETS)
def test_three_counts_are_pods_hosts_per_pod_and_ranks_per_host(name: str) -> None:
    _, hosts, pods = rv.Topology.preset(name, 2, 3, 2).levels
    assert hosts.groups == ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11))
    assert pods.groups == (tuple(range(6)), tuple(range(6, 12)))


@pytest.mark.parametrize(
    "name, num_ranks", [("dgx-v100", 32), ("dgx-a100", 32), ("gb200-nvl72", 288), ("ethernet", 32)]
)
def test_one_count_is_hosts_with_the_ranks_per_host_of_the_preset(
    name: str, num_ranks: int
) -> None:
    assert rv.Topology.preset(name, 4).ranks == frozenset(range(num_ranks))


@pytest.mark.parametrize("short", ["v100", "a100", "h100"])
def test_short_gpu_names_select_the_dgx_preset(short: str) -> None:
    assert rv.Topology.preset(short, 2, 4) == rv.Topology.preset(f"dgx-{short}", 2, 4)


def test_plan_on_three_levels_sends_every_element_between_pods_once() -> None:
    shape = (64, 64)
    src, dst = rv.Layout(shape, "R(1)V(1)D(16,1)"), rv.Layout(shape, "R(16)V(1)D(1,1)")
    pods = rv.Topology.preset("ethernet", 2, 2, 4)
    plan = rv.plan(src, dst, "float32", pods)
    pod_of = pods.homes[2]
    crossing = sum(
        num_elements for _, (a, b), num_elements in plan.program.traffic() if pod_of[a] != pod_of[b]
    )
    assert crossing == 64 * 64


def test_unknown_preset_is_rejected_with_a_list_of_presets() -> None:
    message = "no preset 'abacus'; the presets are a100, dgx-a100, .*, gb200-nvl72, h100, v100"
    with pytest.raises(rv.LayoutError, match=message):
        rv.Topology.preset("abacus", 1, 8)


@pytest.mark.parametrize("counts", [(), (0, 8), (2, -1), (1, 2, 3, 4), (2**20, 2**20)])
def test_invalid_counts_are_rejected(counts: tuple[int, ...]) -> None:
    with pytest.raises(rv.LayoutError, match="expected hosts x ranks or pods x hosts x ranks"):
        rv.Topology.preset("dgx-h100", *counts)


@pytest.mark.parametrize("hosts, num_ports", [("2x4", 2), ("2x2x2", 3)])
def test_command_line_accepts_two_and_three_levels(
    hosts: str, num_ports: int, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["R(1)V(1)D(8,1)", "R(8)V(1)D(1,1)", "--shape", "64,64", "--hosts", hosts]
    assert cli.main(["plan", *words, "--preset", "dgx-v100"]) == 0
    # One gather per level, the slowest link first.
    assert capsys.readouterr().out.count(" all_gather ") == num_ports


@pytest.mark.parametrize("hosts", ["0x4", "2x2x2x2"])
def test_command_line_rejects_invalid_counts(
    hosts: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["R(1)V(1)D(2)", "R(2)V(1)D(1)", "--shape", "6", "--hosts", hosts]
    assert cli.main(["plan", *words]) == 2
    assert f"of {hosts} groups: expected hosts x ranks" in capsys.readouterr().err
