"""Laws of stored rows: they are reused only while the code that they depend on is the same."""

from __future__ import annotations

import json
import subprocess
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from bench.cells import store
from bench.cells.searches import equally_priced, origin_text
from bench.cells.store import (
    DirtyError,
    Job,
    Row,
    Version,
    commits_text,
    restore,
    rows_of,
    sources,
    workloads_of,
)
from bench.cells.workload import Workload
from bench.search import command
from bench.search.catalogue import cells
from bench.search.command import draw, ratio, table, wanted_of

FILES = {
    "superscaler_core/a.py": "",
    "rvdcomm/b.py": "",
    "bench/one.py": "from bench.two import x\nfrom bench import three\n",
    "bench/two.py": "x = 1\n",
    "bench/three.py": "",
    "bench/other.py": "",
    "docs/page.md": "",
}


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with one commit and no stored rows; jobs run in this process."""
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(text)
    git("init", "-q")
    commit()

    def here(do: object, given: Sequence[Job], *rest: object) -> map[object]:
        assert callable(do)
        return map(do, given)

    monkeypatch.setattr(store, "side_by_side", here)
    monkeypatch.setattr(store, "keep_graphs", lambda folder: None)
    return tmp_path


def git(*words: str) -> None:
    user = ("-c", "user.name=x", "-c", "user.email=x@y")
    subprocess.run(["git", *user, *words], check=True, capture_output=True)


def commit() -> None:
    git("add", "-A", "--", *{name.split("/")[0] for name in FILES})
    git("commit", "-q", "-m", "x")


def computed(budget_secs: float = 1.0, left: int = 0, by: str = "p") -> bool:
    """Whether a row had to be computed."""
    done = []

    def compute(cell: str, planner: str, budget: float) -> dict[str, object]:
        done.append(cell)
        return {"cell": cell, "planner": planner, "left": left}

    (row,) = rows_of([Job("c", by, budget_secs)], compute, Version.now("bench.one"), 1)
    assert row["commit"]
    return bool(done)


def test_sources_of_a_module_are_the_files_that_it_imports() -> None:
    found = sources("bench.search.catalogue")
    assert {"bench/cells/cell.py", "bench/hidup/models.py", "bench/studies/systems.py"} <= set(
        found
    )
    assert not {"bench/search/command.py", "bench/studies/report.py"} & set(found)


@pytest.mark.usefixtures("repository")
def test_search_that_does_not_end_is_stopped_and_its_row_says_so() -> None:
    def compute(cell: str, planner: str, budget: float) -> dict[str, object]:
        time.sleep(60)
        raise AssertionError("was stopped before")

    (row,) = rows_of([Job("c", "p", 0.02, num_gpus=4)], compute, Version.now("bench.one"), 1)
    assert row["problem"] == "stopped after 0.08 s, 4 times the budget"
    assert row["gpus"] == 4
    assert Job("c", "p", 0.02).path.exists()


@pytest.mark.usefixtures("repository")
@pytest.mark.parametrize("name", FILES)
def test_row_is_recomputed_only_if_code_it_depends_on_changed(name: str) -> None:
    assert computed()
    assert not computed()
    Path(name).write_text(f"{FILES[name]}\ny = 2\n")
    commit()
    assert computed() == (name not in ("docs/page.md", "bench/other.py"))
    assert not computed()


@pytest.mark.usefixtures("repository")
def test_rows_of_engine_planners_do_not_depend_on_compared_systems(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store, "SYSTEMS", "bench/two.py")
    assert [computed(by="Megatron"), computed(by="auto")] == [True, True]
    Path("bench/two.py").write_text("x = 5\n")
    commit()
    assert [computed(by="Megatron"), computed(by="auto")] == [True, False]
    Path("bench/three.py").write_text("x = 5\n")
    commit()
    assert [computed(by="Megatron"), computed(by="auto")] == [True, True]


@pytest.mark.usefixtures("repository")
def test_row_is_reused_if_only_comments_and_docstrings_changed() -> None:
    two = Path("bench/two.py")
    two.write_text('def f():\n    "Old."\n    return "a"\n')
    commit()
    assert computed()
    before = Version.now("bench.one")
    two.write_text('"""New."""\n\ndef f():\n    # New.\n    """Other."""\n    return "a"\n')
    commit()
    assert not computed()
    assert Version.now("bench.one").key == before.key
    assert before.is_here
    two.write_text('def f():\n    "Old."\n    return "b"\n')
    commit()
    assert computed()
    assert Version.now("bench.one").key != before.key
    assert not before.is_here


@pytest.mark.usefixtures("repository")
def test_larger_budget_recomputes_only_unfinished_searches() -> None:
    assert computed(2.0, left=3)
    assert not computed(1.0)
    assert computed(4.0, left=0)
    assert not computed(8.0)


@pytest.mark.usefixtures("repository")
def test_run_resumes_from_a_result_file() -> None:
    assert computed(2.0, left=3)
    path = Job("c", "p", 2.0).path
    result = Path("result.json")
    result.write_text(json.dumps({"rows": [json.loads(path.read_text())]}))
    path.unlink()
    restore(result, Version.now("bench.one"))
    assert not computed(2.0)
    assert computed(4.0, left=3)
    restore(result, Version.now("bench.one"))
    assert not computed(4.0)
    path.unlink()
    Path("bench/two.py").write_text("x = 4\n")
    commit()
    restore(result, Version.now("bench.one"))
    assert computed(2.0)


@pytest.mark.usefixtures("repository")
def test_budgets_in_evaluations_have_rows_of_their_own() -> None:
    limits = []

    def compute(cell: str, planner: str, budget: float, max_tried: int = 0) -> dict[str, object]:
        limits.append(max_tried)
        return {"cell": cell, "planner": planner, "left": 3}

    jobs = [Job("c", "p", 2.0, max_tried=num) for num in (0, 24, 48, 24)]
    version = Version.now("bench.one")
    rows = [row for job in jobs for row in rows_of([job], compute, version, 1)]
    assert limits == [0, 24, 48]
    assert [row.get("max_tried", 0) for row in rows] == [0, 24, 48, 24]
    Path("result.json").write_text(json.dumps({"rows": rows}))
    jobs[1].path.unlink()
    restore(Path("result.json"), version)
    assert jobs[1].kept(version) == rows[1]


def test_uncommitted_code_is_rejected_or_marked_as_dirty(repository: Path) -> None:
    assert computed()
    (repository / "bench/two.py").write_text("x = 2\n")
    with pytest.raises(DirtyError, match=r"bench/two\.py(.|\n)*--dirty"):
        Version.now("bench.one")
    version = Version.now("bench.one", may_be_dirty=True)
    assert version.commit.endswith("-dirty")
    assert Job("c", "p", 1.0).kept(version) is None


@pytest.mark.usefixtures("repository")
def test_code_change_during_a_run_raises_dirty_error() -> None:
    def compute(cell: str, planner: str, budget: float) -> dict[str, object]:
        Path("bench/two.py").write_text("x = 3\n")
        return {}

    with pytest.raises(DirtyError, match="changed during the run"):
        list(rows_of([Job("c", "p", 1.0)], compute, Version.now("bench.one"), 1))
    assert not Job("c", "p", 1.0).path.exists()


@pytest.mark.usefixtures("repository")
def test_each_row_names_its_commit() -> None:
    assert computed()
    before = json.loads(Job("c", "p", 1.0).path.read_text())["commit"]
    Path("docs/page.md").write_text("new")
    commit()
    assert not computed()
    rows = [{"commit": before}, {"commit": Version.now("bench.one").commit}]
    assert commits_text(rows[:1]) == f"commit {before}"
    assert origin_text(rows).endswith(", equal in all that rows depend on")
    assert f"have the same prices today: commit {before}" in origin_text(rows[1:], rows[:1])


# --- the search's table -------------------------------------------------------------------------


def test_auto_and_tuned_systems_come_before_all_other_planners() -> None:
    chosen = [cell for cell in cells().values() if cell.num_gpus == 4 and "auto" in cell.first]
    wanted = [(cell.name, name) for cell, name in wanted_of(chosen)]
    assert len(set(wanted)) == len(wanted)
    num_first = sum(len({*cell.first, *cell.systems}) for cell in chosen)
    first = {(cell.name, name) for cell in chosen for name in (*cell.first, *cell.systems)}
    assert set(wanted[:num_first]) == first


ROWS = [
    {"cell": "a-4", "gpus": 4, "planner": "auto", "secs": 2.0, "search_secs": 1.0},
    {"cell": "a-4", "gpus": 4, "planner": "tuned", "secs": 3.0, "shares": {"compute": 0.5}},
    {"cell": "a-4", "gpus": 4, "planner": "alpa", "secs": 2.5},
    {"cell": "b-4", "gpus": 4, "planner": "auto", "problem": "no"},
    {"cell": "b-4", "gpus": 4, "planner": "alpa", "secs": 2.5},
]


def test_older_rows_are_taken_for_cells_whose_plans_have_the_same_price() -> None:
    def row(cell: str, planner: str, plan: str, secs: float, peak_bytes: int = 5) -> Row:
        figures = {"plan": plan, "samples": 8, "secs": secs, "peak_bytes": peak_bytes}
        return {"cell": cell, "planner": planner, **figures}

    failed = {"cell": "equal", "planner": "hidup", "problem": "no"}
    older = [
        *(row("equal", name, "dp", 2.0) for name in ("auto", "alpa")),
        failed,
        *(row("other plan", name, "dp", 2.0) for name in ("auto", "alpa")),
        *(row("slower", name, "dp", 2.0) for name in ("auto", "alpa")),
        *(row("larger", name, "dp", 2.0) for name in ("auto", "alpa")),
        row("not again", "auto", "dp", 2.0),
    ]
    again = [
        row("equal", "auto", "dp", 2.0),
        row("equal", "alpa", "tp", 1.0),
        {**failed, "cell": "other plan", "planner": "alpa"},
        row("other plan", "auto", "tp", 2.0),
        row("slower", "auto", "dp", 2.0),
        row("slower", "alpa", "dp", 2.1),
        row("larger", "auto", "dp", 2.0, peak_bytes=6),
    ]
    assert equally_priced(again, older) == older[:3]


def test_a_cell_without_an_equal_plan_is_searched_by_the_next_planner(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def row(cell: str, planner: str, plan: str) -> Row:
        figures = {"plan": plan, "samples": 8, "secs": 2.0, "peak_bytes": 5}
        return {"cell": cell, "planner": planner, **figures}

    now = {("a", "auto"): "dp", ("b", "auto"): "tp", ("b", "alpa"): "dp"}
    asked: list[tuple[str, str]] = []

    def run(args: Namespace, jobs: Sequence[Job], compute: store.Compute) -> list[Row]:
        asked.extend((job.cell, job.planner) for job in jobs)
        return [row(job.cell, job.planner, now[job.cell, job.planner]) for job in jobs]

    monkeypatch.setattr(command, "run", run)
    older = [row(cell, name, "dp") for cell in "ab" for name in ("auto", "alpa", "hidup")]
    path = tmp_path / "older.json"
    path.write_text(json.dumps({"rows": older}))
    jobs = [Job(row["cell"], row["planner"], 1.0) for row in older]
    found, taken = command.rows_of_jobs(Namespace(others=path), jobs)
    assert asked == [*now] == [(row["cell"], row["planner"]) for row in found]
    assert taken == [older[1], older[2], older[5]]


def test_ratio_compares_auto_with_the_best_other_planner() -> None:
    assert ratio(ROWS[:3]) == 1.25
    assert ratio(ROWS[:3], ["tuned"]) == ratio(ROWS[:3], ["tuned", "auto"]) == 1.5
    assert ratio(ROWS[3:]) is None


def test_table_has_at_most_100_columns_and_the_picture_is_drawn(tmp_path: Path) -> None:
    text = table(ROWS, {"a-4": ["tuned", "auto"], "b-4": ["auto"]})
    assert " 1.250  1.500   2.000 alpa" in text
    assert "tuned system 1.500\nmean of 1 / the share of computing in its step 2.000" in text
    assert "least ratio 1.250, cells below 1: 0" in text
    assert max(map(len, text.splitlines())) <= 100
    draw(ROWS, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_workloads_of_jobs_have_no_duplicates() -> None:
    one, two = (Workload("gpt", {"layers": n}, "float32", 4) for n in (2, 3))
    # The optimizer is not part of a graph.
    also_one = replace(one, optimizer="momentum", master_dtype=None)
    jobs = [
        Job(cell, "p", 1.0, train)
        for cell, train in zip("abcde", (one, two, one, also_one, None), strict=True)
    ]
    assert workloads_of(jobs) == [one, two]
