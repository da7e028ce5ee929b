"""Tests of ``bench.cluster.netns``: missing requirements are reported before any command runs."""

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
def test_cluster_without_root_is_rejected_before_any_command_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    message = r"nothing was created; it needs root \(this is uid 1000\): run it with sudo"
    with pytest.raises(ClusterUnavailableError, match=message), Cluster(2, 1, RATE):
        pass


@pytest.mark.usefixtures("untouched_machine")
def test_error_without_root_and_iproute2_lists_all_missing_requirements(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setenv("PATH", str(tmp_path))
    message = r"root .*; and `ip` on PATH: install iproute2 .*; and `tc` on PATH"
    with pytest.raises(ClusterUnavailableError, match=message), Cluster(2, 1, RATE):
        pass


def test_missing_capabilities_of_root_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Capabilities of root in a container without --privileged: bits 12 and 21 are not set.
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
