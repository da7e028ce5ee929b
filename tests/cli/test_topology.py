"""``rvdcomm topology``: presets, files, matrices, pictures, and what is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest

import rvdcomm as rv
from rvdcomm import cli


def output(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.main(["topology", *words]) == 0
    return capsys.readouterr().out


def test_a_preset_is_printed_with_its_bounds(capsys) -> None:
    printed = output(capsys, "torus:4x4", "--link", "1e-6,1GB/s", "--size", "16MiB")
    network, _, rest = printed.partition("\n\n")
    assert rv.Network.parse(network) == rv.Network.preset("torus", 4, 4, link=rv.Link(1e-6, 1e9))
    assert rest.startswith("16 ranks, 0 switches, 64 wires")
    # ORACLES, table of optima: 4.267 GB/s.
    assert "all-gather       3.932 ms     4.267 GB/s  into rank 0" in rest
    assert "all-reduce       7.864 ms     2.133 GB/s  all messages together" in rest


def test_trees_are_compared_with_the_bound(capsys) -> None:
    printed = output(capsys, "ndv2:2", "--trees")
    lines = printed.splitlines()
    assert lines[-6].split()[:5] == ["all-gather", "42.95", "ms", "25", "GB/s"]
    # TE-CCL reaches 22.86 GB/s here.
    assert lines[-5].split() == ["trees", "25", "GB/s", "1.00", "of", "it"]


@pytest.mark.parametrize("form", ["json", "text", "topology", "matrix"])
def test_every_kind_of_file_is_read(form: str, capsys, tmp_path: Path) -> None:
    path = tmp_path / "network"
    topology = rv.Topology.hosts([[0, 1], [2, 3]], rv.Link(1e-6, 1e9), rv.Link(1e-5, 1e8))
    expected = rv.Network.of(topology)
    if form == "json":
        expected.save(path)
    elif form == "topology":
        topology.save(path)
    elif form == "text":
        path.write_text(f"# two hosts\n{expected}\n")
    else:
        path.write_text("\tGPU0\tGPU1\nGPU0\tX\tNV4\nGPU1\tNV4\tX\n")
        expected = rv.Network.parse("0 <-> 1  3 us  100 GB/s")
    saved = tmp_path / "saved.json"
    printed = output(capsys, str(path), "--save", str(saved))
    assert printed.startswith(str(expected))
    assert printed.endswith(f"wrote  {saved}\n")
    assert rv.Network.load(saved) == expected


def test_standard_input_is_a_file_too(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    stdin = io.TextIOWrapper(io.BytesIO(b"0 <-> 1  3 us  25 GB/s\n"))
    monkeypatch.setattr(sys, "stdin", stdin)
    assert json.loads(output(capsys, "-", "--json")) == (
        rv.Network.parse("0 <-> 1  3 us  25 GB/s").to_json()
    )


def test_other_commands_take_the_same_networks(capsys, tmp_path: Path) -> None:
    words = ["plan", "R(1)V(1)D(16)", "R(16)V(1)D(1)", "--shape", "4096", "--topology"]
    assert cli.main([*words, "ndv2:2"]) == 0
    printed = capsys.readouterr().out
    path = tmp_path / "network.txt"
    path.write_text(f"{rv.Network.preset('ndv2', 2)}\n")
    assert cli.main([*words, str(path)]) == 0
    assert capsys.readouterr().out == printed
    layouts = [rv.Layout((4096,), text) for text in words[1:3]]
    assert printed == f"{rv.plan(*layouts, topology=rv.Network.preset('ndv2', 2))}\n"


def test_trees_are_a_step_of_a_plan_that_can_be_printed_proved_and_drawn(
    capsys, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    words = ["R(1)V(4)D(1)", "R(4)V(1)D(1)", "--shape", "16777216", "--topology", "line:4"]
    assert cli.main(["plan", *words, "--picture", str(tmp_path / "plan.svg")]) == 0
    assert "0     trees" in capsys.readouterr().out
    drawn = (tmp_path / "plan.svg").read_text()
    assert "message-0-0-1" in drawn
    assert "message-0-0-3" not in drawn
    assert cli.main(["verify", *words]) == 0
    assert "proved" in capsys.readouterr().out


def test_a_network_is_drawn(capsys, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="pictures need the extra 'plot'")
    for name in ("ndv2.svg", "ndv2.png"):
        output(capsys, "ndv2:2", "--picture", str(tmp_path / name))
    drawn = (tmp_path / "ndv2.svg").read_text()
    assert "12.5 GB/s each way" in drawn
    assert ">15</text>" in drawn
    output(capsys, "ndv2:2", "--picture", str(tmp_path / "again.svg"))
    assert (tmp_path / "again.svg").read_text() == drawn


@pytest.mark.parametrize(
    "words, error",
    [
        (["dgx-9"], "No such file: 'dgx-9'; it is no preset either, which are .*dgx-1"),
        (["dgx-1:two"], "No such file: 'dgx-1:two'"),
        (["torus:4by4"], "No such file: 'torus:4by4'.* with counts such as ndv2:2 or torus:4x4"),
        (["ring:4", "--link", "fast"], "cannot parse link 'fast'"),
        (["ring:4", "--link", "1,0B/s"], "cannot parse link"),
        (["dgx-1", "--link", "1,1GB/s"], "--link is for a shape, as torus:4x4"),
        (["dgx-1:2x4"], "its hosts have 8 ranks"),
        (["torus"], "a grid of no ranks"),
        (["dgx-1", "--picture", "x.gif"], "use a name in .svg or .png"),
        (["ring:201", "--picture", "x.svg"], "a picture shows 200"),
    ],
)
def test_wrong_requests_are_refused_in_a_line(words, error, capsys) -> None:
    assert cli.main(["topology", *words]) == 2
    printed = capsys.readouterr()
    assert not printed.out
    assert len(printed.err.splitlines()) == 1
    assert re.search(error, printed.err)
