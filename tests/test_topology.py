"""Laws of topologies: distances, files, presets, bad input."""

from __future__ import annotations

import json
import os
import pickle
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

import rvdcomm as rv
from rvdcomm.topology import PRESETS, blocks
from tests.oracle import WORLD, random_topology

LINK = rv.Link(1e-6, 1e9)
SLOW = rv.Link(1e-5, 1e8)
RACKS = rv.Topology(
    (
        rv.Level("rank", tuple((rank,) for rank in range(6)), LINK),
        rv.Level("host", ((0, 1), (2, 3), (4, 5)), SLOW),
        rv.Level("rack", ((0, 1, 2, 3), (4, 5)), SLOW),
    )
)

# --- distance -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "a, b, distance", [(3, 3, 0), (2, 3, 1), (3, 2, 1), (0, 2, 2), (3, 1, 2), (0, 4, 3), (5, 3, 3)]
)
def test_distance_counts_the_levels_that_a_byte_passes(a: int, b: int, distance: int) -> None:
    assert RACKS.distance(a, b) == distance


@pytest.mark.parametrize("a, b, distance", [(0, 0, 0), (0, 1, 1)])
def test_distance_inside_one_host_is_at_most_one(a: int, b: int, distance: int) -> None:
    assert rv.Topology.single_host(2, 0, 1).distance(a, b) == distance


@pytest.mark.parametrize("seed", range(20))
def test_distance_is_an_ultrametric(seed: int) -> None:
    topology = random_topology(random.Random(seed))
    d = [[topology.distance(a, b) for b in range(WORLD)] for a in range(WORLD)]
    triples = [(a, b, c) for a in range(WORLD) for b in range(WORLD) for c in range(WORLD)]
    assert all(d[a][b] == d[b][a] <= max(d[a][c], d[c][b]) for a, b, c in triples)


@pytest.mark.parametrize("seed", range(20))
def test_order_keeps_the_groups_of_every_level_together(seed: int) -> None:
    topology = random_topology(random.Random(seed))
    ranks = sorted(topology.ranks, key=topology.order.__getitem__)
    num_changes = [sum(h[a] != h[b] for a, b in pairwise(ranks)) for h in topology.homes]
    assert num_changes == [len(level.groups) - 1 for level in topology.levels]


# --- construction -------------------------------------------------------------------------------


def test_single_host_has_a_port_for_every_rank() -> None:
    level = rv.Level("rank", ((0,), (1,), (2,)), LINK)
    assert rv.Topology.single_host(3, 1e-6, 1e9) == rv.Topology((level,))


def test_hosts_have_a_port_for_every_rank_and_a_nic_for_every_host() -> None:
    topology = rv.Topology.hosts([[3, 0], [5]], intra=LINK, inter=SLOW)
    ports = rv.Level("rank", ((0,), (3,), (5,)), LINK)
    assert topology == rv.Topology((ports, rv.Level("host", ((0, 3), (5,)), SLOW)))


def test_ranks_are_all_ranks() -> None:
    assert rv.Topology.hosts([[3, 0], [5]], LINK, SLOW).ranks == {0, 3, 5}


def test_homes_number_the_groups_of_every_level() -> None:
    assert RACKS.homes[1:] == (
        {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2},
        {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1},
    )


def test_blocks_number_ranks_host_by_host() -> None:
    assert list(blocks(3, 2)) == [range(0, 2), range(2, 4), range(4, 6)]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_hosts_with_a_slower_start_between_them(name: str) -> None:
    intra, inter = (level.link for level in rv.Topology.preset(name, 2, 4).levels)
    assert 0 < intra.alpha_secs < inter.alpha_secs


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_ranks_asked_for(name: str) -> None:
    assert rv.Topology.preset(name, 3, 4).levels[1].groups == (
        (0, 1, 2, 3),
        (4, 5, 6, 7),
        (8, 9, 10, 11),
    )


def test_equal_topologies_hash_equally() -> None:
    a, b = (rv.Topology.hosts([[0, 1], [2]], LINK, SLOW) for _ in range(2))
    assert (a, hash(a)) == (b, hash(b))


def in_process(hash_seed: int, code: str, data: bytes) -> bytes:
    """Stdout of ``code`` in another interpreter, which hashes text by another seed."""
    run = subprocess.run(
        [sys.executable, "-c", code],
        input=data,
        capture_output=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
    )
    return run.stdout


def test_topology_sent_to_another_process_is_found_among_its_equals() -> None:
    # Text hashes differently in every process, so that a hash must not travel with its object.
    topology = rv.Topology.hosts([[0, 1], [2]], LINK, SLOW)
    hash(topology)
    code = (
        "import pickle, sys, rvdcomm as rv\n"
        "sent = pickle.load(sys.stdin.buffer)\n"
        "same = rv.Topology(tuple(rv.Level(l.name, l.groups, l.link) for l in sent.levels))\n"
        "print({sent: 'found'}.get(same, 'lost'))\n"
    )
    answers = {in_process(seed, code, pickle.dumps(topology)) for seed in (1, 2)}
    assert answers == {b"found\n"}


# --- files --------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_load_undoes_save(seed: int, tmp_path: Path) -> None:
    topology = random_topology(random.Random(seed))
    topology.save(tmp_path / "topology.json")
    assert rv.Topology.load(tmp_path / "topology.json") == topology


def test_saved_file_is_plain_json(tmp_path: Path) -> None:
    rv.Topology.hosts([[0, 1], [2]], LINK, SLOW).save(tmp_path / "topology.json")
    assert json.loads((tmp_path / "topology.json").read_text())["levels"][1] == {
        "name": "host",
        "groups": [[0, 1], [2]],
        "alpha_secs": 1e-5,
        "bytes_per_sec": 1e8,
    }


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "7",
        "{}",
        '{"levels": 7}',
        '{"levels": []}',
        '{"levels": [7]}',
        '{"levels": [{"name": "rank"}]}',
        '{"levels": [{"name": "rank", "groups": [0], "alpha_secs": 0, "bytes_per_sec": 1}]}',
        '{"levels": [{"name": "rank", "groups": [[0]], "alpha_secs": "a", "bytes_per_sec": 1}]}',
    ],
)
def test_load_names_a_file_that_is_no_topology(text: str, tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    path.write_text(text)
    with pytest.raises(rv.LayoutError, match=r"topology\.json is not a topology: "):
        rv.Topology.load(path)


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha_secs, bytes_per_sec", [(-1e-6, 1e9), (0, 0), (0, -1.0)])
def test_impossible_links_are_rejected(alpha_secs: float, bytes_per_sec: float) -> None:
    message = "alpha_secs must be at least 0 and bytes_per_sec above 0"
    with pytest.raises(rv.LayoutError, match=message):
        rv.Link(alpha_secs, bytes_per_sec)


def test_rank_on_two_hosts_is_rejected() -> None:
    with pytest.raises(rv.LayoutError, match=r"topology names a rank twice: \[0, 1, 1, 2\]"):
        rv.Topology.hosts([[0, 1], [1, 2]], LINK, SLOW)


@pytest.mark.parametrize(
    "racks, host",
    [(((0, 1, 2), (3, 4, 5)), r"\(2, 3\)"), (((0, 1, 2, 3),), r"\(4, 5\)")],
    ids=["cut", "missing"],
)
def test_host_that_is_not_inside_one_rack_is_rejected(
    racks: tuple[tuple[int, ...], ...], host: str
) -> None:
    levels = (*RACKS.levels[:2], rv.Level("rack", racks, SLOW))
    with pytest.raises(rv.LayoutError, match=f"host {host} is not inside one rack of the topology"):
        rv.Topology(levels)


def test_lowest_level_whose_ranks_share_a_port_is_rejected() -> None:
    with pytest.raises(rv.LayoutError, match="rank"):
        rv.Topology((rv.Level("rank", ((0, 1), (2,)), LINK),))


def test_unknown_preset_is_rejected_with_the_known() -> None:
    message = "no preset 'abacus'; the presets are a100, ethernet, h100, v100"
    with pytest.raises(rv.LayoutError, match=message):
        rv.Topology.preset("abacus", 1, 8)


def test_check_ranks_names_the_unknown() -> None:
    message = r"ranks \[7, 9\] are not in the topology, which has \[0, 1\]\."
    with pytest.raises(rv.LayoutError, match=message):
        rv.Topology.single_host(2, 0, 1).check_ranks([9, 0, 7])


def test_check_ranks_accepts_the_known() -> None:
    rv.Topology.single_host(2, 0, 1).check_ranks([1, 0])
