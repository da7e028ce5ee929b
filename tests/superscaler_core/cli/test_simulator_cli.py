"""``superscaler simulate``: its output, its files and its errors for invalid requests."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import rvdcomm as rv
from superscaler_core.simulator import PROFILES
from tests.superscaler_core.cli.conftest import Say

PIPELINE = ["simulate", "mlp", "one_f_one_b", "--devices", "2", "--set", "microbatches=3"]


def test_simulate_prints_time_bubble_communication_and_memory(say: Say) -> None:
    said = say([*PIPELINE, "--topology", "v100:2x1"])
    assert (said.status, said.err) == (0, "")
    assert said.out.startswith("MLPModel on 2 x V100-32GB: ")
    assert "bubble of makespan" in said.out
    header = ["devices", "compute", "communication", "bubble", "computing"]
    assert header in [line.split() for line in said.out.splitlines()]
    for name in ("rank", "host", "weights", "assumptions"):
        assert name in said.out
    assert max(map(len, said.out.splitlines())) <= 100


def test_summary_has_the_first_report_lines_and_the_peak_memory(say: Say) -> None:
    whole = say(PIPELINE).out.splitlines()
    time, bubble, memory = say([*PIPELINE, "--summary"]).out.splitlines()
    assert [time, bubble] == whole[:2]
    peaks = [line for line in whole if line.endswith(memory.split(" at most")[0][len("memory ") :])]
    assert [line.split()[0] for line in peaks] == [memory.split("device ")[1].split(";")[0]]


def test_simulate_writes_a_trace_and_a_picture(tmp_path: Path, say: Say) -> None:
    pytest.importorskip("matplotlib")
    trace, picture = tmp_path / "step.json", tmp_path / "step.svg"
    said = say([*PIPELINE, "--trace", str(trace), "--picture", str(picture)])
    assert f"wrote {trace}" in said.out
    assert f"wrote {picture}" in said.out
    assert json.loads(trace.read_text())["traceEvents"]
    assert "<svg" in picture.read_text()


def test_explain_writes_a_page_and_refuses_other_names(tmp_path: Path, say: Say) -> None:
    words = ["explain", *PIPELINE[1:], "--topology", "v100:2x1", "--html"]
    page = tmp_path / "step.html"
    said = say([*words, str(page)])
    assert said.status == 0
    assert said.out.startswith(f"wrote {page}")
    assert 'id="document"' in page.read_text()
    refused = say([*words, str(tmp_path / "step.pdf")])
    assert refused.status == 2
    assert "expected FILE.html or FILE.htm" in refused.err


def test_profile_and_topology_are_read_from_files(tmp_path: Path, say: Say) -> None:
    profile, topology = tmp_path / "profile.json", tmp_path / "topology.json"
    replace(PROFILES["a100"], name="mine").save(profile)
    rv.Topology.preset("a100", 2, 2).save(topology)
    words = [*PIPELINE, "--profile", str(profile), "--topology", str(topology)]
    assert say(words).out.startswith("MLPModel on 2 x mine: ")


def test_communication_options_set_methods_inside_and_between_stages(say: Say) -> None:
    said = say([*PIPELINE, "--communication", "p2p", "--inter", "rvd"])
    assert "communication inside stages by p2p, between stages by rvd" in said.out


def test_out_of_memory_exits_with_1(tmp_path: Path, say: Say) -> None:
    profile = tmp_path / "profile.json"
    replace(PROFILES["v100"], memory_bytes=1000).save(profile)
    said = say([*PIPELINE, "--profile", str(profile)])
    assert said.status == 1
    assert "out of memory: devices 0,1 have 1000 B" in said.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--profile", "v1"], "--profile v1: there is no such file, and no such preset; the"),
        (["--topology", "v100:4y8"], "No such file: 'v100:4y8'; it is no preset either"),
        (["--topology", "v100:1x1"], "--topology v100:1x1 has 1 devices, and the plan 2"),
        (["--topology", "v9:1x8"], "No such file: 'v9:1x8'; it is no preset either"),
        (["--picture", "step.gif"], "use a name in .png, .svg or .pdf"),
    ],
)
def test_invalid_simulate_request_exits_with_2_and_a_one_line_error(
    words: list[str], message: str, say: Say
) -> None:
    said = say([*PIPELINE, *words])
    assert said.status == 2
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ((), "V100-32GB"),
        (("--topology", "a100:1x2"), "A100"),
        (("--topology", "ethernet:1x2"), "V100-32GB"),
        (("--topology", "a100:1x2", "--profile", "h100"), "H100"),
    ],
)
def test_profile_is_that_of_the_topology_unless_it_is_said(
    words: tuple[str, ...], name: str, say: Say
) -> None:
    assert f"on 2 x {name}" in say([*PIPELINE, *words]).out
