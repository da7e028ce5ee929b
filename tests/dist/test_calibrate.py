"""Calibration on real processes: hosts are found, links come out equal on all ranks, and load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import rvdcomm as rv
from bench.cluster import netns
from bench.cluster.emulated import Cluster
from rvdcomm import cli
from rvdcomm.calibration import Effort, calibrate, spawned, table
from tests.dist.on_ranks import on_ranks
from tests.dist.shards import error_of

pytestmark = [pytest.mark.dist, pytest.mark.alone]

# The package exports the function under the name of its module.
module = sys.modules["rvdcomm.calibration.calibrate"]

ROOT = Path(__file__).resolve().parents[2]
QUICK = Effort(secs=0.01, max_bytes=64 << 10)
LINK = rv.Link(1e-5, 1e9)
HOSTS = rv.Topology.hosts([[2, 0], [3, 1]], LINK, LINK)


@pytest.mark.parametrize("executor", ["auto", "dist"])
@on_ranks(4)
def test_ranks_of_one_machine_are_one_host_and_agree_on_its_links(rank: int, executor: str) -> None:
    topology, fit = calibrate(executor=executor, effort=QUICK)
    of_ranks: list[Any] = [None] * 4
    dist.all_gather_object(of_ranks, repr((topology, fit)))
    assert len(set(of_ranks)) == 1
    assert [level.groups for level in topology.levels] == [((0,), (1,), (2,), (3,))]
    assert topology.levels[0].link == fit.levels[0].link
    assert 1e-7 < topology.levels[0].link.alpha_secs < 0.1
    assert 1e5 < topology.levels[0].link.bytes_per_sec < 1e12
    assert dict(fit.about)["executor"] == executor


@on_ranks(4)
def test_groups_of_a_given_topology_are_measured(rank: int) -> None:
    links, fit = calibrate(executor="dist", like=HOSTS, effort=QUICK)
    # On a busy machine a host may seem slow, and then the links are a network.
    assert [level.name for level in fit.levels] == ["rank", "host"]
    assert fit.rates.hosts == ((0, 2), (1, 3))
    assert {sample.kind for sample in fit.levels[1].samples} == {"swap", "transfer"}
    ends = rv.Layout((8, 8), "R(1)V(1)D(4,1)"), rv.Layout((8, 8), "R(4)V(1)D(1,1)")
    rv.plan(*ends, topology=links).verify()


@on_ranks(4)
def test_a_slow_host_of_four_is_found_and_has_a_slow_link_on_all_ranks(rank: int) -> None:
    """Every rank waits for its bytes, and rank 2 four times as long: no transfer takes as long."""
    make = module._Calibration._call

    def waiting(run: Any, probe: Any, num_bytes: int) -> Callable[[], None]:
        call, secs = make(run, probe, num_bytes), num_bytes / (4e5 if rank == 2 else 16e5)
        return lambda: (time.sleep(secs), call())[0]

    like = rv.Topology.hosts([[0], [1], [2], [3]], LINK, LINK)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module._Calibration, "_call", waiting)
        network, fit = calibrate(executor="dist", like=like, effort=QUICK)
    of_ranks: list[Any] = [None] * 4
    dist.all_gather_object(of_ranks, repr((network, fit)))
    assert len(set(of_ranks)) == 1
    assert isinstance(network, rv.Network)
    assert [[host for host, _ in way.others] for way in fit.rates.ways] == [[2], [2]]
    assert network.link(2, "fabric").bytes_per_sec < 0.5 * network.link(0, "fabric").bytes_per_sec
    assert "host 2 (rank 2) sends at " in table(fit)
    ends = rv.Layout((8, 8), "R(1)V(1)D(4,1)"), rv.Layout((8, 8), "R(4)V(1)D(1,1)")
    rv.plan(*ends, topology=network).verify()


@on_ranks(4)
def test_disagreement_about_effort_is_an_error_on_every_rank(rank: int) -> None:
    effort = Effort(secs=0.01, max_bytes=(1 + rank // 3) << 16)
    error = error_of(lambda: calibrate(effort=effort))
    assert "calibrate: ranks disagree about effort" in error
    assert ", rank 3 for " in error


@on_ranks(4)
def test_a_topology_of_other_ranks_is_rejected(rank: int) -> None:
    like = rv.Topology.single_host(3, 1e-5, 1e9)
    error = error_of(lambda: calibrate(like=like, effort=QUICK))
    assert "the topology has 3 ranks, the group has ranks 0 to 3" in error


@on_ranks(4, 5.0, dying=[2])
def test_a_rank_that_dies_is_an_error_that_names_the_transfer(rank: int) -> None:
    if rank == 2:
        module._Calibration._repeated = lambda *args: os._exit(7)
    error = error_of(lambda: calibrate(effort=QUICK, executor="dist"))
    what = "CommError: calibrate all_to_all of 4096 bytes: gloo all_gather on group (0:4)"
    assert what in error


@pytest.mark.parametrize(
    "values",
    [{"secs": 0}, {"secs": float("nan")}, {"max_bytes": 4096}, {"min_bytes": 0}, {"long_secs": -1}],
)
def test_invalid_efforts_are_rejected(values: dict[str, Any]) -> None:
    with pytest.raises(rv.LayoutError, match="Effort"):
        Effort(**values)


# --- command line -------------------------------------------------------------------------------


def test_the_command_starts_ranks_prints_a_table_and_writes_a_topology(tmp_path: Path) -> None:
    out = tmp_path / "topology.json"
    command = [sys.executable, "-m", "rvdcomm", "calibrate", "--ranks", "2", "--secs", "0.01"]
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    done = subprocess.run(
        [*command, "--max-bytes", "64KiB", "--out", str(out)],
        **{"cwd": ROOT, "env": environment, "timeout": 100},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert "reduce_scatter" in done.stdout
    assert f"wrote {out}" in done.stdout
    link = rv.Topology.load(out).levels[0].link
    notes = json.loads(out.read_text())["calibration"]
    assert notes["levels"][0]["alpha_secs"] == link.alpha_secs
    assert notes["ranks"] == "2"
    assert len(notes["levels"][0]["samples"]) == 9
    pair = ["R(1)V(1)D(2,1)", "R(2)V(1)D(1,1)", "--shape", "6,6", "--topology", str(out)]
    assert cli.main(["plan", *pair]) == 0


@pytest.mark.parametrize(
    "words, message",
    [
        (["--ranks", "1"], "links are between ranks; start at least 2"),
        (["--out", "nowhere/topology.json"], "--out nowhere/topology.json: there is no folder"),
        (["--backend", "nccl"], "nccl ranks are started by a launcher, such as torchrun"),
        (["--max-bytes", "many"], "cannot parse bytes 'many'"),
    ],
)
def test_invalid_options_of_the_command_are_rejected(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", *words]) == 2
    assert message in capsys.readouterr().err


def test_command_fails_if_its_processes_fail(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    like = tmp_path / "like.json"
    rv.Topology.single_host(3, 1e-5, 1e9).save(like)
    words = ["calibrate", "--ranks", "2", "--like", str(like), "--out", str(tmp_path / "out.json")]
    assert cli.main(words) == 1
    assert "the topology has 3 ranks, the group has ranks 0 to 1" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def raise_on_the_last() -> None:
    """The last rank raises first, but its process ends after those of the other ranks."""
    if dist.get_rank() == dist.get_world_size() - 1:
        leave = dist.destroy_process_group
        dist.destroy_process_group = lambda: (leave(), time.sleep(2.0))
        raise LookupError("mist")


def test_spawned_raises_the_error_of_the_rank_that_failed_first() -> None:
    with pytest.raises(rv.CommError, match=r"^calibrate: LookupError: mist$"):
        spawned(2, timedelta(seconds=20), 60.0, raise_on_the_last)


@pytest.mark.cluster
@pytest.mark.skipif(bool(netns.missing_requirements()), reason="needs root, ip and tc")
def test_hosts_of_an_emulated_cluster_and_their_bandwidth_are_found(tmp_path: Path) -> None:
    out = tmp_path / "topology.json"
    command = [sys.executable, "-m", "rvdcomm", "calibrate", "--out", str(out), "--secs", "0.05"]
    with Cluster(2, 2, 100e6) as cluster:
        env = {"PYTHONPATH": str(ROOT)}
        cluster.run([*command, "--max-bytes", "1MiB"], timeout_secs=90, env=env, echo=False)
    notes = json.loads(out.read_text())["calibration"]
    assert notes["rates"]["hosts"] == [[0, 1], [2, 3]]
    assert rv.Network.load(out).ranks == (0, 1, 2, 3)
    # 95.7 % of 12.5 MB/s is payload. Bursts of 12 kB pass at once, which made it 4 % faster; a busy
    # machine makes it slower.
    assert 0.85 < notes["levels"][1]["bytes_per_sec"] / (0.957 * 12.5e6) < 1.1


@pytest.mark.cluster
@pytest.mark.skipif(bool(netns.missing_requirements()), reason="needs root, ip and tc")
def test_slow_host_of_an_emulated_cluster_is_found_with_its_bandwidth(tmp_path: Path) -> None:
    out = tmp_path / "links.json"
    command = [sys.executable, "-m", "rvdcomm", "calibrate", "--out", str(out), "--secs", "0.05"]
    with Cluster(4, 1, (100e6, 100e6, 25e6, 100e6)) as cluster:
        env = {"PYTHONPATH": str(ROOT)}
        first, *_ = cluster.run(
            [*command, "--max-bytes", "1MiB"], timeout_secs=90, env=env, echo=False
        )
    assert "host 2 (rank 2) sends at " in first.stdout
    network = rv.Network.load(out)
    rates = [network.link(rank, "fabric").bytes_per_sec / 12.5e6 for rank in range(4)]
    # 95.7 % is payload; a busy machine makes a link slower.
    assert [0.6 < rate < 1.1 for rate in rates] == [True, True, False, True]
    assert 0.15 < rates[2] < 0.275
