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
from typing import Any

import pytest

import rvdcomm as rv
from rvdcomm.network import MAX_FILE_BYTES, MAX_FILE_LEVELS, blocks
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
def test_distance_counts_the_levels_between_two_ranks(a: int, b: int, distance: int) -> None:
    assert RACKS.distance(a, b) == distance


@pytest.mark.parametrize("seed", range(6))
def test_distance_is_an_ultrametric(seed: int) -> None:
    topology = random_topology(random.Random(seed))
    d = [[topology.distance(a, b) for b in range(WORLD)] for a in range(WORLD)]
    triples = [(a, b, c) for a in range(WORLD) for b in range(WORLD) for c in range(WORLD)]
    assert all(d[a][b] == d[b][a] <= max(d[a][c], d[c][b]) for a, b, c in triples)


@pytest.mark.parametrize("seed", range(6))
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


def test_homes_map_ranks_to_group_numbers_on_every_level() -> None:
    assert RACKS.homes[1:] == (
        {0: 0, 1: 0, 2: 1, 3: 1, 4: 2, 5: 2},
        {0: 0, 1: 0, 2: 0, 3: 0, 4: 1, 5: 1},
    )


def test_blocks_number_ranks_host_by_host() -> None:
    assert list(blocks(3, 2)) == [range(0, 2), range(2, 4), range(4, 6)]


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


def test_unpickled_topology_has_the_hash_of_an_equal_one_in_another_process() -> None:
    # Hashes of strings differ between processes, so a hash must not be pickled with its object.
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


@pytest.mark.parametrize("seed", range(6))
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


def test_load_reads_files_without_version_and_ignores_unknown_keys(tmp_path: Path) -> None:
    values = {**RACKS.to_json(), "calibration": {"when": "today"}}
    del values["version"]
    (tmp_path / "topology.json").write_text(json.dumps(values))
    assert rv.Topology.load(tmp_path / "topology.json") == RACKS


def test_save_writes_notes_that_load_ignores(tmp_path: Path) -> None:
    RACKS.save(tmp_path / "topology.json", notes={"host": "left"})
    assert json.loads((tmp_path / "topology.json").read_text())["host"] == "left"
    assert rv.Topology.load(tmp_path / "topology.json") == RACKS


def level(**changes: object) -> dict[str, object]:
    return {"name": "rank", "groups": [[0], [1]], "alpha_secs": 0, "bytes_per_sec": 1, **changes}


def text_of(*levels: object, **changes: object) -> str:
    return json.dumps({"version": 1, "levels": levels, **changes})


HOSTILE = {
    "empty": ("", "it is no JSON"),
    "truncated": (text_of(level())[:-20], "it is no JSON"),
    "no UTF-8": ("\udcff", "it is no JSON"),
    "list": ("[]", "expected an object with 'levels'"),
    "number": ("7", "expected an object with 'levels'"),
    "nothing": ("{}", "'levels' is missing"),
    "levels of another type": (text_of(levels=7), "'levels' must be a list, got 7"),
    "no levels": (text_of(), "a topology needs a level"),
    "level of another type": (text_of(7), "expected an object with 'name', got 7"),
    "level without groups": (text_of({"name": "rank"}), "'groups' is missing"),
    "other version": (text_of(level(), version=2), "it is of version 2, this release reads 1"),
    "hostile version": (text_of(level(), version="9" * 9999), r"version '9+\.\.\.9+', this"),
    "deep": ("[" * 100_000, "it is nested too deeply"),
    "deep object": ('{"levels":' * 100_000, "it is nested too deeply"),
    "long integer": (f"[{'9' * 5000}]", "it is no JSON: Exceeds the limit"),
    "too long": (" " * (MAX_FILE_BYTES + 1), f"it is longer than {MAX_FILE_BYTES} bytes"),
    "too many levels": (text_of(*[level()] * 17), f"it has 17 levels, more than {MAX_FILE_LEVELS}"),
    "long name": (text_of(level(name="a" * 65)), "is longer than 64 characters"),
    "name of another type": (text_of(level(name=None)), "'name' must be a text, got None"),
    "group of another type": (text_of(level(groups=[0])), "must be lists of ranks, got 0"),
    "rank of another type": (text_of(level(groups=[[True]])), r"lists of ranks, got \[True\]"),
    "fraction of a rank": (text_of(level(groups=[[1.0]])), r"lists of ranks, got \[1\.0\]"),
    "no ranks": (text_of(level(groups=[])), "rank of the topology has ranks none"),
    "negative rank": (text_of(level(groups=[[-1], [0]])), "has ranks -1 to 0; use 0 to 2147483647"),
    "huge rank": (text_of(level(groups=[[2**31]])), "has ranks 2147483648 to 2147483648; use 0 to"),
    "rank twice": (text_of(level(groups=[[1], [1]])), r"topology names a rank twice: \[1, 1\]"),
    "rank on two hosts": (
        text_of(level(), level(name="host", groups=[[0, 1], [1]])),
        r"topology names a rank twice: \[0, 1, 1\]",
    ),
    "host of unknown ranks": (
        text_of(level(), level(name="host", groups=[[0, 1, 2]])),
        "host has 3 ranks and rank, the level below, 2",
    ),
    "alpha is a text": (text_of(level(alpha_secs="a")), "'alpha_secs' must be a finite number"),
    "alpha is negative": (text_of(level(alpha_secs=-1)), "alpha_secs must be at least 0"),
    "alpha is NaN": (text_of(level(alpha_secs=float("nan"))), "it is no JSON: NaN is no number"),
    "beta is infinite": (text_of(level(bytes_per_sec=float("inf"))), "Infinity is no number"),
    "beta overflows": (
        text_of(level()).replace("1}", "1e999}"),
        "'bytes_per_sec' must be a finite",
    ),
    "beta is a huge integer": (text_of(level(bytes_per_sec=10**999)), "must be a finite number"),
    "beta is zero": (text_of(level(bytes_per_sec=0)), "bytes_per_sec above 0"),
    "beta is true": (text_of(level(bytes_per_sec=True)), "'bytes_per_sec' must be a finite number"),
}


@pytest.mark.parametrize("text, message", HOSTILE.values(), ids=HOSTILE)
def test_load_error_says_why_a_file_is_not_a_topology(
    text: str, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "topology.json"
    path.write_text(text, errors="surrogateescape")
    with pytest.raises(
        rv.LayoutError, match=rf"topology\.json is not a topology: .*{message}"
    ) as e:
        rv.Topology.load(path)
    assert len(str(e.value)) < 300 + len(str(path))


def test_endless_files_are_rejected() -> None:
    with pytest.raises(rv.LayoutError, match="/dev/zero is not a topology: it is longer than"):
        rv.Topology.load("/dev/zero")


def test_infinite_bandwidth_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(rv.LayoutError, match=r"topology\.json cannot be written: Out of range"):
        rv.Topology.single_host(2, 0, float("inf")).save(tmp_path / "topology.json")
    assert not list(tmp_path.iterdir())


# --- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "alpha_secs, bytes_per_sec",
    [(-1e-6, 1e9), (0, 0), (0, -1.0), (float("nan"), 1), (0, float("nan")), (float("inf"), 1)],
)
def test_links_with_invalid_alpha_or_bandwidth_are_rejected(
    alpha_secs: float, bytes_per_sec: float
) -> None:
    message = "alpha_secs must be at least 0 and bytes_per_sec above 0"
    with pytest.raises(rv.LayoutError, match=message):
        rv.Link(alpha_secs, bytes_per_sec)


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
    with pytest.raises(rv.LayoutError, match="the lowest level, 'rank', must have every rank in a"):
        rv.Topology((rv.Level("rank", ((0, 1), (2,)), LINK),))


def test_check_ranks_names_unknown_ranks() -> None:
    message = r"ranks \[7, 9\] are not in the topology, which has \[0, 1\]\."
    with pytest.raises(rv.LayoutError, match=message):
        rv.Topology.single_host(2, 0, 1).check_ranks([9, 0, 7])


def test_a_link_that_is_no_link_is_told() -> None:
    link: Any = (1e-6, 1e9)
    words = r"host of the topology has the link \(1e-06, 1000000000.0\); give a Link\(alpha_secs"
    with pytest.raises(rv.LayoutError, match=words):
        rv.Topology.hosts([[0, 1], [2, 3]], intra=rv.Link(0.0, 1e9), inter=link)
