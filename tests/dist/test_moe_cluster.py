"""A mixture of experts moves between four hosts and back, in many buckets, correctly."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

import rvdcomm as rv
from bench.cluster import netns
from bench.cluster.emulated import Cluster

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.cluster
@pytest.mark.skipif(bool(netns.missing_requirements()), reason="needs root, ip and tc")
def test_model_of_experts_moves_to_other_hosts_and_back(tmp_path: Path) -> None:
    path = tmp_path / "topology.json"
    hosts = [range(i, i + 2) for i in range(0, 8, 2)]
    rv.Topology.hosts(hosts, rv.Link(1e-4, 1e9), rv.Link(2e-4, 1e8)).save(path)
    command = [sys.executable, "-m", "tests.dist.moe_rank", str(path)]
    # Ranks of a host share memory, and those of different hosts send messages.
    env = {"PYTHONPATH": str(ROOT), "RVDCOMM_EXECUTOR": "auto"}
    with Cluster(4, 2, 1e9) as cluster:
        cluster.run(command, timeout_secs=120, env=env, echo=False)
