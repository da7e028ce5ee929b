"""Laws of the RVD benchmark: ratios to point-to-point, its picture, networks, and progress."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from bench import run
from bench.rvd import picture, progress, report
from bench.rvd.cases import IN_GROUP, make_cases
from bench.rvd.methods import point_to_point_traffic
from bench.rvd.modelled import groups_on, rows_on
from bench.rvd.progress import LINE_SECS, Progress
from rvdcomm import Network, plan
from rvdcomm.cost import step_cost

ROOT = Path(__file__).parents[2]


def row(category: str, relation: str, wire_bytes: int = 64, **secs: list[float]) -> dict[str, Any]:
    """A row of a result; the layouts matter only for the number of ranks of a group."""
    return {
        "category": category,
        "relation": relation,
        "size": "1 MiB",
        "src": "R(4)V(1)D(1,1) shape(8,8) ranks(0:4)",
        "samples": secs,
        "limit_secs": 1e-3,
        "steps": ["transfer", "all_gather"],
        "wire_bytes": wire_bytes,
    }


ROWS = [
    row("V->R", "n->n", ours=[2e-3, 2e-3, 9e-3], p2p=[0.2], dtensor=[3e-3]),
    row("V->R", "n->2n", ours=[4e-3], p2p=[8e-3]),
    row("R->R", IN_GROUP, wire_bytes=0, ours=[1e-6], p2p=[1.0]),
    row("R->R", "2n->n", ours=[2e-3], p2p=[1e-3]),
]
RESULT = {"title": "RVD benchmark: a test", "rows": ROWS}


def lines_of(text: str) -> list[list[str]]:
    """The words of every line, where columns are two blanks apart."""
    return [[word.strip() for word in line.split("  ") if word] for line in text.splitlines()]


# --- point-to-point beside ours -----------------------------------------------------------------


def test_table_has_the_ratio_of_point_to_point_to_ours() -> None:
    _, _, head, *lines = lines_of(report.table(RESULT))
    ratios = [line[head.index("P2P ÷ ours")] for line in lines]
    assert ratios == ["100", "2.00", "1000000", "0.500"]


def test_table_has_no_column_without_values() -> None:
    rows = [row("V->R", "n->n", ours=[1e-3])]
    assert "÷ ours" not in report.table({"rows": rows})


def test_up_to_is_the_largest_ratio_of_a_category_where_data_move() -> None:
    *_, all_of_it = lines = lines_of(report.up_to(ROWS))
    assert ["V->R", "up to 100 x", "V->R, n->n, 1 MiB"] in lines
    assert ["R->R", "up to 0.500 x", "R->R, 2n->n, 1 MiB"] in lines
    assert all_of_it == ["all", "up to 100 x", "V->R, n->n, 1 MiB"]


def test_up_to_is_empty_without_point_to_point() -> None:
    assert report.up_to([row("V->R", "n->n", ours=[1e-3])]) == ""


def test_picture_has_a_panel_per_category_with_the_ratio_of_every_case() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot")
    figure, axis = pyplot.subplots()
    picture.draw_panel(axis, ROWS[:2])
    assert [text.get_text() for text in axis.texts] == ["100x", "2x"]
    assert axis.get_yscale() == "log"
    heights = [[bar.get_height() for bar in bars] for bars in axis.containers]
    assert heights == [[200.0, 8.0], [2.0, 4.0]]
    pyplot.close(figure)


@pytest.mark.parametrize("rows", [ROWS, ROWS[:1], [row("R->D", "n->n", ours=[1e-3])]])
def test_picture_is_written(tmp_path: Path, rows: list[dict[str, Any]]) -> None:
    pytest.importorskip("matplotlib")
    picture.plot({**RESULT, "rows": rows}, tmp_path / "rvd.png")
    assert (tmp_path / "rvd.png").read_bytes().startswith(b"\x89PNG")


# --- networks -----------------------------------------------------------------------------------


def test_groups_on_a_network_are_its_halves() -> None:
    groups = groups_on(Network.preset("torus", 2, 4))
    assert groups["n->n"] == ([0, 1, 2, 3], [4, 5, 6, 7])
    assert groups["n->2n"] == ([0, 1], [4, 5, 6, 7])
    assert groups[IN_GROUP] == ([*range(8)], [*range(8)])


def test_rows_on_a_network_have_the_costs_of_the_plan_and_of_all_messages() -> None:
    network = Network.preset("torus", 2, 2)
    cases = [case for case in make_cases(groups_on(network), ["64 KiB"]) if "V" in case.category]
    for case, found in zip(cases, rows_on(network, cases), strict=True):
        planned = plan(*case.layouts, "float32", network)
        messages = step_cost(point_to_point_traffic(*case.layouts, 4), network)
        assert found["samples"] == {"ours": [planned.cost.secs], "p2p": [messages.secs]}
        assert found["limit_secs"] == planned.bound.secs


@pytest.mark.parametrize("what", ["ring:4", "FILE"])
def test_network_option_models_the_cases_on_a_preset_or_a_file(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if what == "FILE":
        what = str(tmp_path / "network.txt")
        Path(what).write_text(str(Network.preset("ring", 4)))
    out = tmp_path / "out.json"
    assert run.main(["--network", what, "--sizes", "64 KiB", "--out", str(out)]) == 0
    printed, result = capsys.readouterr().out, json.loads(out.read_text())
    assert "64 KiB float32, modelled ms:" in printed
    assert "P2P ÷ ours" in printed
    assert len(result["rows"]) == 24
    assert result["wall_secs"] > 0


def test_unknown_network_ends_the_command_with_status_2(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run.main(["--network", "nonesuch"]) == 2
    assert "bench: No such file: 'nonesuch'; it is no preset either" in capsys.readouterr().err


def test_network_of_one_rank_is_refused() -> None:
    with pytest.raises(SystemExit, match="needs 2 ranks or more; this one has 1"):
        groups_on(Network.parse("0 <-> switch  1 us  1 GB/s"))


def test_network_and_cluster_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.parse_args(["--network", "ring:4", "--cluster", "2x2"])
    assert "not allowed with argument" in capsys.readouterr().err


# --- progress -----------------------------------------------------------------------------------


def shown_at(*secs: float, num_done: list[int], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines in a log of 5 cases, of which so many are done at these times."""
    times = iter([0.0, *secs])
    shown = Progress(total=5, is_tty=False, clock=lambda: next(times))
    for count in num_done:
        shown.show(count, f"case {count}")
    shown.close()
    return capsys.readouterr().err.splitlines()


def test_progress_in_a_log_is_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    secs = [0, LINE_SECS / 2, LINE_SECS, LINE_SECS + 1, LINE_SECS + 2]
    assert shown_at(*secs, num_done=[1, 2, 3, 4, 5], capsys=capsys) == [
        "1/5 cases, 0 s: case 1",
        "3/5 cases, 3 s: case 3",
        "5/5 cases, 5 s: case 5",
    ]


def test_progress_in_a_log_says_nothing_twice(capsys: pytest.CaptureFixture[str]) -> None:
    lines = shown_at(0, 10 * LINE_SECS, num_done=[1, 1], capsys=capsys)
    assert lines == ["1/5 cases, 0 s: case 1"]


def test_progress_on_a_terminal_is_a_bar_that_is_removed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = Progress(total=2, is_tty=True)
    shown.show(1, "a case")
    assert capsys.readouterr().err == f"\r[{'#' * 15:<30}] 1/2 cases, 0 s"
    shown.close()
    assert capsys.readouterr().err.endswith("\r")


def test_watch_ignores_a_line_that_is_not_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = threading.Event()
    done.set()
    results = tmp_path / "results.jsonl"
    results.write_text(json.dumps(ROWS[0]) + '\n{"category": "V-')
    progress.watch(results, 2, done)
    assert capsys.readouterr().err == "1/2 cases, 0 s: V->R n->n 1 MiB\n"


# --- processes ----------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.slow
def test_cases_in_a_group_run_beside_ranks_outside_it(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--n", "2", "--secs", "0.01", "--methods", "ours,p2p,dtensor,torch"]
    cases = ["--sizes", "64 KiB", "--categories", "D->R", "--relations", "in group,n->n"]
    command = [sys.executable, "-m", "bench.run", *options, *cases, "--out", str(out)]
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    assert "P2P ÷ ours" in done.stdout
    assert "2/2 cases" in done.stderr
    inside, between = json.loads(out.read_text())["rows"]
    assert inside["samples"].keys() == {"ours", "p2p", "dtensor", "torch: all_gather"}
    assert between["samples"].keys() == {"ours", "p2p"}
