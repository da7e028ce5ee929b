"""Laws of networks: texts and files that give the network back, levels, and what is refused."""

from __future__ import annotations

import json
import math
import pickle
import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import rvdcomm as rv
from rvdcomm.network import MACHINES, PRESETS, SHAPES, both_ways
from tests.network.oracle import random_network
from tests.oracle import random_topology
from tests.strategies import seeds

FAST, SLOW = rv.Link(1e-6, 8e9), rv.Link(1e-5, 1e9)
FIGURES = st.floats(1e-12, 1e15, allow_nan=False) | st.sampled_from([1e-6, 25e9, 1.0, 3e8])
NAMED = [
    *((name, counts) for name in MACHINES for counts in ((1,), (2,), (3,))),
    *((name, (2,)) for name in PRESETS),
    *((name, (2, 3)) for name in SHAPES),
]


@pytest.mark.parametrize("name, counts", NAMED)
def test_parse_undoes_str_of_every_preset(name: str, counts: tuple[int, ...]) -> None:
    network = rv.Network.preset(name, *counts)
    assert rv.Network.parse(str(network)) == network


@given(seeds)
def test_parse_undoes_str_of_random_networks(seed: int) -> None:
    network = random_network(random.Random(seed))
    assert rv.Network.parse(str(network)) == network


@given(FIGURES, FIGURES)
def test_text_gives_the_figures_of_a_link_to_the_last_bit(alpha: float, rate: float) -> None:
    network = rv.Network((*both_ways([0], 1, rv.Link(alpha, rate)),))
    assert rv.Network.parse(str(network)) == network


def test_infinite_rate_has_a_text_and_no_file(tmp_path: Path) -> None:
    network = rv.Network(tuple(both_ways([0], 1, rv.Link(0.0, math.inf))))
    assert rv.Network.parse(str(network)) == network
    with pytest.raises(rv.LayoutError, match="cannot be written"):
        network.save(tmp_path / "network.json")


@pytest.mark.parametrize("seed", range(20))
def test_load_undoes_save(seed: int, tmp_path: Path) -> None:
    network = random_network(random.Random(seed))
    network.save(tmp_path / "network.json", notes={"about": "a test"})
    assert rv.Network.load(tmp_path / "network.json") == network


@given(seeds)
def test_a_network_is_the_same_in_any_order_of_its_wires(seed: int) -> None:
    rng = random.Random(seed)
    network = random_network(rng)
    wires = rng.sample(network.wires, len(network.wires))
    switches = rng.sample(network.switches, len(network.switches))
    other = rv.Network(tuple(wires), tuple(switches))
    assert other == network
    assert hash(other) == hash(network)
    assert str(other) == str(network)


def test_one_line_stands_for_wires_of_all_its_nodes() -> None:
    pairs = rv.Network.parse("0:2,3 <-> 0:2,3  1 us  1 GB/s  # all pairs")
    assert [(wire.src, wire.dst) for wire in pairs.wires] == [
        (0, 1), (0, 3), (1, 0), (1, 3), (3, 0), (3, 1),
    ]  # fmt: skip
    one_way = rv.Network.parse("0 -> 1  1 us  1 GB/s\n1 -> 0  2 us  2 GB/s")
    assert one_way.link(1, 0) == rv.Link(2e-6, 2e9)


def test_a_switch_keeps_what_it_can_do() -> None:
    text = "switch nvls multicasts adds\n0:4 <-> nvls  1 us  450 GB/s"
    network = rv.Network.parse(text)
    assert network.switches == (rv.Switch("nvls", multicasts=True, adds=True),)
    assert str(network) == text


# --- levels ------------------------------------------------------------------------------------


@given(seeds)
def test_a_topology_is_found_in_its_network(seed: int) -> None:
    topology = random_topology(random.Random(seed))
    network = rv.Network.of(topology)
    assert network.levels is topology
    found = rv.Network(network.wires, network.switches).levels
    assert found is not None
    assert [level.link for level in found.levels] == [level.link for level in topology.levels]
    groups = [
        [sorted(map(sorted, level.groups)) for level in one.levels] for one in (found, topology)
    ]
    assert groups[0] == groups[1]


def test_names_of_levels_travel_with_the_network() -> None:
    topology = rv.Topology.preset("gb200-nvl72", 2, 2)
    network = pickle.loads(pickle.dumps(rv.Network.of(topology)))
    assert network.levels == topology
    assert network == rv.Network.of(topology)


@pytest.mark.parametrize(
    "network",
    [
        rv.Network.preset("dgx-1"),
        rv.Network.preset("dgx-a100-rails", 2),
        rv.Network.preset("torus", 2, 2),
        rv.Network.hosts([[0, 1], [2, 3]], [FAST, SLOW], SLOW),
        rv.Network.hosts([[0, 1], [2, 3]], FAST, [FAST, SLOW]),
        rv.Network.hosts([[0, 1, 4], [2, 3]], FAST, SLOW, ranks_per_nic=2),
        rv.Network.parse("0:2 <-> a  1 us 1 GB/s\n0:2 -> b  1 us 1 GB/s\nb -> 0:2  1 us 1 GB/s"),
        rv.Network.parse("switch a adds\n0:2 <-> a  1 us 1 GB/s"),
        rv.Network.parse("0:2 -> a  1 us 1 GB/s\na -> 0:2  1 us 2 GB/s"),
    ],
)
def test_networks_that_are_no_nested_equal_groups_have_no_levels(network: rv.Network) -> None:
    assert network.levels is None


def test_hosts_of_equal_links_are_a_topology() -> None:
    hosts = [[0, 1, 2, 3], [4, 5]]
    network = rv.Network.hosts(hosts, FAST, SLOW)
    assert network == rv.Network.of(rv.Topology.hosts(hosts, FAST, SLOW))


def test_hosts_share_their_nics() -> None:
    network = rv.Network.hosts([[0, 1, 2], [3]], FAST, [SLOW, FAST], ranks_per_nic=2)
    assert network.link(0, "host0.nic0") == network.link("host0.nic0", "fabric") == SLOW
    assert network.link(2, "fabric") == SLOW
    assert network.link(3, "fabric") == FAST
    assert network.link(2, "host0") == FAST


# --- what is refused ---------------------------------------------------------------------------

WIRES = tuple(both_ways([0, 1], "s", FAST))


@pytest.mark.parametrize(
    "wires, switches, error",
    [
        ((), (), "a network needs ranks"),
        (both_ways(["a"], "b", FAST), (), "a network needs ranks"),
        ((rv.Wire(0, 0, FAST),), (), "a wire goes from 0 to itself"),
        ((rv.Wire(0, True, FAST),), (), "a wire names True"),
        ((rv.Wire(0, -1, FAST),), (), "a network has ranks from 0 to .*, not -1"),
        ((rv.Wire(0, "7", FAST),), (), "a wire names '7'"),
        ((rv.Wire(0, 1, 5.0),), (), "has the link 5.0"),
        ((*WIRES, rv.Wire(0, "s", SLOW)), (), "two wires go from 0 to s"),
        ((rv.Wire(0, 1, FAST),), (), "rank 1 of the network cannot reach rank 0"),
        ((rv.Wire(1, 0, FAST),), (), "rank 1 of the network cannot be reached from rank 0"),
        ((*WIRES, *both_ways([2], "t", FAST)), (), "rank 2 .* cannot be reached from rank 0"),
        ((*WIRES, rv.Wire(0, "t", FAST)), (), "switch t of the network cannot reach rank 0"),
        (WIRES, (rv.Switch("t"),), "switch 't' has no wires"),
        (WIRES, (rv.Switch("s"), rv.Switch("s")), "two switches are named 's'"),
    ],
)
def test_wrong_networks_are_refused(wires, switches, error) -> None:
    with pytest.raises(rv.LayoutError, match=error):
        rv.Network(tuple(wires), switches)


@pytest.mark.parametrize(
    "line, error",
    [
        ("0 <-> 1  1 us  -1 GB/s", "line 2: cannot parse"),
        ("0 <-> 1  1 us", "line 2: cannot parse"),
        ("0 = 1  1 us  1 GB/s", "line 2: cannot parse"),
        ("0 <-> 1  1 us  0 GB/s", "line 2: link with .* bytes_per_sec above 0"),
        ("0:4000000 <-> 0:4000000  1 us  1 GB/s", "line 2: .* more"),
        ("switch", "line 2: cannot parse 'switch'"),
        ("switch a multicasts multicasts", "line 2: cannot parse"),
        ("switch a routes", "line 2: cannot parse"),
        ("9x <-> 1  1 us  1 GB/s", "line 2: cannot parse ranks '9x'"),
    ],
)
def test_wrong_lines_are_named(line: str, error: str) -> None:
    with pytest.raises(rv.LayoutError, match=error):
        rv.Network.parse(f"2 <-> 3  1 us  1 GB/s\n{line}")


@pytest.mark.parametrize(
    "change, error",
    [
        ({"version": 2}, "version 2, this release reads 1"),
        ({"wires": 3}, "'wires' must be a list"),
        ({"wires": [3]}, "expected an object"),
        ({"wires": [{"src": 0.5}]}, "'src' must be a text"),
        ({"switches": [{"name": "s", "multicasts": 1}]}, "'multicasts' must be a truth value"),
    ],
)
def test_wrong_files_are_refused(change, error, tmp_path: Path) -> None:
    path = tmp_path / "network.json"
    path.write_text(json.dumps(rv.Network(WIRES).to_json() | change))
    with pytest.raises(rv.LayoutError, match=f"is not a network: .*{error}"):
        rv.Network.load(path)


@pytest.mark.parametrize(
    "call, error",
    [
        (lambda: rv.Network.preset("dgx-9"), "no preset 'dgx-9'; the presets are .*dgx-1"),
        (lambda: rv.Network.preset("dgx-1", 0), "counts of at least 1, not 0"),
        (lambda: rv.Network.preset("dgx-1", 2, 4), "its hosts have 8 ranks"),
        (lambda: rv.Network.preset("torus"), "a grid of no ranks"),
        (lambda: rv.Network.preset("mesh", 1, 1), "a grid of 1x1 ranks"),
        (lambda: rv.Network.preset("line"), "a grid of 1 ranks"),
        (lambda: rv.Network.hosts([[0], [0]], FAST, SLOW), "no rank may be in two"),
        (lambda: rv.Network.hosts([[0], []], FAST, SLOW), "each needs a rank"),
        (lambda: rv.Network.hosts([[0], [1]], FAST, [SLOW]), "inter has 1 links for 2 hosts"),
        (lambda: rv.Network.hosts([[0], [1]], FAST, SLOW, 0), "expected at least 1"),
        (lambda: rv.Network(WIRES).check_ranks([1, 5]), r"ranks \[5\] are not in the network"),
    ],
)
def test_errors_say_what_would_be_right(call, error) -> None:
    with pytest.raises(rv.LayoutError, match=error):
        call()


def test_a_file_of_a_topology_is_a_network(tmp_path: Path) -> None:
    topology = rv.Topology.hosts([[0, 1], [2, 3]], FAST, SLOW)
    topology.save(tmp_path / "topology.json")
    assert rv.Network.load(tmp_path / "topology.json") == rv.Network.of(topology)


NEAR = rv.Link(1e-6, 1e9)


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda: rv.Network.parse("0 <-> 1 3 us 1e999 B/s"), "line 1: '1e999' is too large"),
        (lambda: rv.Network.preset("ring", 10**9), "at most 65536 in all"),
        (lambda: rv.Network.preset("dgx-1", 8193), "1 to 8192 of them"),
        (lambda: rv.Network.preset("dgx-1", "2"), "counts of at least 1, not '2'"),
        (lambda: rv.Network.preset("ring", 2.5), "counts of at least 1, not 2.5"),
        (lambda: rv.Network.preset("line", 1), "and 2 ranks or more"),
        (
            lambda: rv.Network.hosts([["a"]], rv.Link(0, 1), rv.Link(0, 1)),
            "ranks from 0 to .*, not 'a'",
        ),
        (
            lambda: rv.Network.hosts(
                [[0, 1], [2, 3]], rv.Link(0, 1), rv.Link(0, 1), ranks_per_nic=1.5
            ),
            "ranks_per_nic is 1.5",
        ),
        (lambda: rv.Network.of("dgx-1"), r"an rv.Topology or an rv.Network, .* and not 'dgx-1'"),
        (lambda: rv.Network.of(None), "and not None"),
    ],
)
def test_wrong_arguments_are_named(make, words: str) -> None:
    with pytest.raises(rv.LayoutError, match=words):
        make()
