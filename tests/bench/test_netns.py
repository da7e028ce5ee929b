"""Tests of ``bench.cluster.netns``: where no cluster can be, that is said at once."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from bench.cluster import netns
from bench.cluster.emulated import Cluster, ClusterUnavailableError, main

RATE = 50e6


@pytest.fixture
def untouched_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail the test if it runs any tool."""

    def refuse(command: list[str], **_: object) -> None:
        raise AssertionError(f"ran {command}")

    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(subprocess, "Popen", refuse)


@pytest.mark.usefixtures("untouched_machine")
def test_cluster_without_root_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    message = r"nothing was created; it needs root \(this is uid 1000\): run it with sudo"
    with pytest.raises(ClusterUnavailableError, match=message), Cluster(2, 1, RATE):
        pass


@pytest.mark.usefixtures("untouched_machine")
def test_cluster_without_iproute2_is_refused_with_all_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = r"root .*; and `ip` on PATH: install iproute2 .*; and `tc` on PATH"
    with pytest.raises(ClusterUnavailableError, match=message), Cluster(2, 1, RATE):
        pass


def test_root_without_capabilities_is_told_which(monkeypatch: pytest.MonkeyPatch) -> None:
    # What root in a container without --privileged has: neither bit 12 nor bit 21.
    status = "Name:\tpython\nCapEff:\t00000000a80425fb\n"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(Path, "read_text", lambda _: status)
    assert netns.missing_requirements()[:2] == [
        "the capability CAP_NET_ADMIN: run the container with --privileged",
        "the capability CAP_SYS_ADMIN: run the container with --privileged",
    ]


@pytest.mark.usefixtures("untouched_machine")
@pytest.mark.parametrize("options", [["--measure"], ["--clean"], ["--", "true"]])
def test_command_line_without_root_ends_with_status_2(
    options: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert main(options) == 2
    assert "it needs root (this is uid 1000): run it with sudo" in capsys.readouterr().err
