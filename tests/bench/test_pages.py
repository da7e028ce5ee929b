"""Laws of pages with results: they show the numbers of the result, and no other text changes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from bench.pages import command as pages
from bench.pages.text import Pictures, written
from bench.studies import one_gpu, transfers
from bench.studies.report import Compared
from bench.studies.study import COLUMNS, STUDIES, THEN
from bench.studies.transfers import SIZES

DOCS = Path(__file__).parents[2] / "docs"


def row(cell: str, planner: str, speed: float) -> dict[str, Any]:
    """The row of a planner; if ``speed`` is 0, the planner found no plan."""
    head = {"cell": cell, "planner": planner}
    if not speed:
        tried = "no plan was found for 8 devices: 3 were tried; the smallest needs 99 GiB of 30."
        return {**head, "problem": f"{tried} Use more devices or another planner."}
    return {
        **head, "plan": f"plan of {planner}", "microbatches": 128, "secs": 100 / speed,
        "samples_per_sec": speed, "peak_bytes": 8 << 30,
        "shares": {"compute": 0.5, "communication": 0.25, "bubble": 0.25},
        "pulled_secs": {"intra": 150 / speed, "inter": 200 / speed, "both": 250 / speed},
    }  # fmt: skip


def compared(speeds: dict[str, float], column: str = THEN, gpus: int = 4) -> Compared:
    """A comparison; the last planner of ``speeds`` is ours."""
    *baselines, ours = speeds
    rows = {name: row(f"c-{gpus}", name, speed) for name, speed in speeds.items()}
    return Compared(column, gpus, f"L{gpus}", ours, tuple(baselines), rows)


def study_result(name: str) -> dict[str, Any]:
    """A study: our system is 1.5 times as fast on 4 GPUs, and the only one that fits on 8."""
    study, cells = STUDIES[name], []
    for column in COLUMNS:
        for gpus, speed in ((4, 10.0), (8, 0.0)):
            speeds = dict.fromkeys(study.baselines[column], speed)
            cells.append(compared({**speeds, study.ours[column]: 15.0}, column, gpus))
    return {
        "title": study.title, "claim": study.claim, "differences": ["d " * 90, "e"],
        "cells": [asdict(cell) for cell in cells],
    }  # fmt: skip


def result() -> dict[str, Any]:
    """A result as ``python -m bench.studies all`` writes it."""
    secs = {"rvd": 1.0, "p2p": 8.0}
    methods = {"recompute": 4096, "ZeRO-3-offload": 0, "co-shard": 8192}
    sizes = dict.fromkeys(map(str, one_gpu.SEQUENCES), 7.25)
    memory = [
        {"method": method, "longest": longest, "gib": sizes, "secs": sizes}
        for method, longest in methods.items()
    ]
    return {
        "command": "python -m bench.studies x", "date": "2026-01-02 03:04 UTC",
        "commits": "commit abc123", "assumptions": ["a " * 90, "b"], "columns": COLUMNS,
        "studies": {name: study_result(name) for name in STUDIES},
        "memory": {"notes": ["n"], "claim": one_gpu.CLAIM, "rows": memory},
        "transfers": [
            {"category": "R->D", "relation": "n->n", "size": size, "secs": secs} for size in SIZES
        ],
    }  # fmt: skip


HIDUP = [
    {
        "cell": "2x4-30gbps bert-sgmoe", "gpus": 8, "planner": planner, "secs": secs,
        "compute_secs": 0.3, "comm_secs": 0.2, "peak_bytes": 1 << 30, **found,
    }
    for planner, secs, found in [
        ("HiDup", 0.4, {"plan": "2 stages", "over_bound": 0.01, "predicted_secs": 0.4}),
        ("DDP", 0.6, {}),
        ("FastMoE", 0.5, {}),
    ]
]  # fmt: skip

SCALING = [
    {
        "cell": f"strong-{num}-rvd", "gpus": num, "planner": "Megatron", "secs": 64 / num,
        "samples_per_sec": 8.0 * num, "plan": "some",
        "pulled_secs": {"intra": 96 / num, "inter": 64 / num, "both": 128 / num},
    }
    for num in (4, 8)
]  # fmt: skip


SEARCH = [
    {**row(cell, planner, speed), "gpus": gpus, "search_secs": 50.0}
    for cell, gpus, speeds in (
        ("a-4", 4, {"auto": 2.0, "Megatron": 1.0, "tofu": 0.5}),
        ("b-4", 4, {"auto": 3.0, "Megatron": 2.0}),
        ("c-8", 8, {"auto": 1.0, "Megatron": 0.0}),
        ("d-16", 16, {"auto": 2.0, "Megatron": 1.0}),
    )
    for planner, speed in speeds.items()
]
"""Rows of a search; on c-8 only auto has a plan."""


def trained(workload: str, ours_secs: float) -> dict[str, Any]:
    """A row of real training, in which DDP takes half a second and one process a second."""
    secs = {"auto": ours_secs, "one": 1.0, "ddp": 0.5}
    one = {"cpu_secs": [0.1] * 3, "sent_bytes": [1, 1], "peak_bytes": [1 << 20, 8 << 20]}
    return {
        "workload": workload, "world": "4", "plans": ["auto"], "against": ["one", "ddp"],
        "found": {"auto": "some plan"}, "planned_bytes": {},
        "competitors": {name: {"secs": [each] * 3, **one} for name, each in secs.items()},
    }  # fmt: skip


TRAINING = [trained("gpt", 0.25), trained("moe", 0.5)]

ALPA = [
    {
        "model": "gpt-2.6b", "gpus": 8, "whose": whose, "plan": f"plan of {whose}", "samples": 8,
        "secs": secs, "peak_bytes": 3 << 30, "cpu_secs": 1.0,
    }
    for whose, secs in (("Alpa", 3.0), ("ours", 2.0))
]  # fmt: skip
"""Rows of Alpa's published plan and of ours."""

RESULTS = {
    "alpa_plans": ALPA, "studies": [], "hidup": HIDUP, "strong_scaling": SCALING, "search": SEARCH,
    "training": TRAINING,
}  # fmt: skip


@pytest.fixture(scope="module")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the pages, generated from ``RESULTS``."""
    folder = tmp_path_factory.mktemp("pages")
    found = folder / "docs"
    for name in pages.PAGES:
        copy = found / f"{name}.md"
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(DOCS / f"{name}.md", copy)
    images = found / "img"
    images.mkdir()
    for name, rows in RESULTS.items():
        tuned = {name: ["Megatron"] for name in ("a-4", "b-4", "c-8", "d-16")}
        made = {**result(), "rows": rows, "tuned": tuned}
        (folder / f"{name}.json").write_text(json.dumps(made))
    words = ["--docs", str(found), "--results", str(folder), "--images", str(images)]
    assert pages.main(words) == 0
    return found


def text_of(page: str, part: str) -> str:
    return page.split(f"<!-- {part}: begin -->")[1].split(f"<!-- {part}: end -->")[0]


def test_result_part_near_the_page_start_has_factors_and_a_picture(docs: Path) -> None:
    for name, study in STUDIES.items():
        page = (docs / f"studies/{name}.md").read_text()
        assert page.index("result: begin") < 400
        first = text_of(page, "result")
        assert " ".join(first.split()).count("**1.50 x on 4 GPUs, 1.50 x at least**") == len(
            COLUMNS
        )
        assert f"up to {study.claim} x" in " ".join(first.split())
        for link in re.findall(r"\]\((.*?)\)", page.split("<!-- result: end -->")[0]):
            assert (docs / "studies" / link).exists()
        assert f"study_{name}.png" in first


def test_pages_have_the_numbers_and_assumptions_of_the_result(docs: Path) -> None:
    numbers = {
        path.stem: text_of(path.read_text(), "numbers") for path in docs.glob("studies/*.md")
    }
    swin = numbers["swin"]
    assert "| 4 | L4 | 10 | 10 | 10 | 15 | 1.50 x | 2.00 x |" in swin
    assert "| 8 | L8 | none | none | none | 15 | - | - |" in swin
    assert "| 8 | L8 | Megatron | none |  |" in swin
    why = (
        "- Megatron, 8 GPUs, L8: no plan was found for 8 devices: 3 were tried; the smallest needs"
    )
    assert why in " ".join(swin.split())
    plan = "| 4 | L4 | co-shard | plan of co-shard | 128 | 8.0 | 6.667 | 50.0% | 25.0% | 25.0% |"
    assert plan in swin
    assert "| co-shard | 7.2 |" in numbers["gpt3"]
    assert "sequence is 2.00 x that of recompute; the paper: 1.7 x" in numbers["gpt3"]
    assert "| R->D | n->n | 8.00 | 8.00 | 8.00 |" in numbers["README"]
    assert "| c-4 | auto | 6.667 | 1.50 x | 2.00 x | 2.50 x |" in numbers["README"]
    assert "\n- b\n" in text_of((docs / "studies/README.md").read_text(), "assumed")
    overview = text_of((docs / "studies/README.md").read_text(), "result")
    assert f"| {'1.50 x on 4 GPUs, 1.50 x at least | ' * 2}up to 3.5 x |" in overview
    for name in STUDIES:
        assert "\n- e\n" in numbers[name]
        assert "2026-01-02 03:04 UTC, commit abc123" in " ".join(numbers[name].split())
        lines = numbers[name].splitlines()
        assert max(len(line) for line in lines if line[:1] not in ("|", "!")) <= 120


SAID = {
    "studies/hidup: result": ["| 2x4-30gbps | 1.25 x |"],
    "studies/hidup: numbers": [
        "| published | FastMoE |",
        "- bert-sgmoe, HiDup: 2 stages; predicted at most 1.0% above the best",
    ],
    "studies/README: scaling": ["| 8 | 64 (2.0 x) | 64 (2.0 x) |"],
    "measured: reached": [
        "| 4 | 2 | 1.500 | 1.750 | 1.750 | 2.000, a-4 | 2.000 | 1.750 |",
        "| all | 3 | 1.500 | 2.000 | 1.833 | 2.000, a-4 | 2.000 | 1.833 |",
        "| a-4 | 4 | 50 s | 50 s | - | Megatron | 100 s | 50 s | 2.000 | 2.000 |",
        "| c-8 | 8 | 100 s | 50 s | - | none | - | - | - | - |",
    ],
    "measured: published": [
        "| gpt-2.6b | 8 | Alpa | plan of Alpa | 8 | 3 s | 3 GiB | 1.00 x |",
        "| gpt-2.6b | 8 | ours | plan of ours | 8 | 2 s | 3 GiB | 1.50 x |",
    ],
    "measured: training": [
        "gpt 4 0.50 2.00",
        "auto 250.0 250.0 250.0 2.00 4.00 200.0 0.00 - 8.0",
        "auto: some plan",
    ],
}
"""Lines of parts of pages, which follow from ``RESULTS``."""


@pytest.mark.parametrize("where", SAID)
def test_parts_have_the_numbers_of_their_results(docs: Path, where: str) -> None:
    page, _, part = where.partition(": ")
    text = " ".join(text_of((docs / f"{page}.md").read_text(), part).split())
    assert [said for said in SAID[where] if said not in text] == []


def test_part_without_a_result_stays_unchanged(docs: Path) -> None:
    before, after = ((each / "studies/README.md").read_text() for each in (DOCS, docs))
    assert text_of(after, "sensitivity") == text_of(before, "sensitivity")


@pytest.mark.parametrize(
    ("page", "part"), [(page, part) for page, parts in pages.PAGES.items() for part in parts]
)
def test_part_of_a_page_is_that_of_its_result(page: str, part: str) -> None:
    """Nobody edits a part, and no result changes without its page."""
    path = DOCS / f"{page}.md"
    name, section = pages.PAGES[page][part]
    result = DOCS.parent / "bench" / "results" / f"{name}.json"
    said = pages.paragraphs(section, result, Pictures(DOCS / "img", path.parent, draws=False))
    assert text_of(path.read_text(), part).strip() == "\n\n".join(said)


FIGURE = re.compile(
    r"(?<![A-Za-z\d.,])\d[\d,.]* ?(ms|us|µs|s|seconds|%|×|x|MiB|GB/s|TB/s)(?=[ ,.;:)*`]|$)"
)
"""A number with a unit of what is measured; rates and sizes of a case are in other units."""


def test_page_of_measured_times_has_no_figure_that_is_not_of_a_result() -> None:
    text = (DOCS / "measured.md").read_text()
    for part in pages.PAGES["measured"]:
        text = written(text, part, "")
    found = [line for line in text.splitlines() if FIGURE.search(line)]
    assert found == []


def test_text_outside_the_parts_of_a_page_is_unchanged(docs: Path) -> None:
    for name, parts in pages.PAGES.items():
        path = docs / f"{name}.md"
        after, before = path.read_text(), (DOCS / f"{name}.md").read_text()
        for part in parts:
            after = written(after, part, "")
            before = written(before, part, "")
        assert after == before


@pytest.mark.parametrize("marks", ["", "<!-- x: begin -->", "<!-- x: end --><!-- x: begin -->"])
def test_page_without_markers_of_a_part_raises_value_error(marks: str) -> None:
    with pytest.raises(ValueError, match="needs one <!-- x: begin -->"):
        written(f"text\n{marks}", "x", "1")


def test_error_without_a_result_names_the_command_that_creates_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        pages.main(["--results", str(tmp_path)])
    assert "run `python -m bench.studies all` first" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("speeds", "factor", "ceiling"),
    [
        ({"a": 2.0, "b": 4.0, "ours": 6.0}, 1.5, 2.0),
        ({"a": 2.0, "b": 0.0, "ours": 1.0}, 0.5, 2.0),
        ({"a": 0.0, "b": 0.0, "ours": 6.0}, None, None),
        ({"a": 1.0, "b": 0.0, "ours": 0.0}, None, 2.0),
    ],
)
def test_factor_and_ceiling_are_relative_to_the_best_baseline(
    speeds: dict[str, float], factor: float | None, ceiling: float | None
) -> None:
    cell = compared(speeds)
    assert (cell.factor, cell.ceiling) == (factor, ceiling)


def test_steps_independent_of_the_communication_method_are_omitted() -> None:
    moving, slower, faster = (row("c", name, 1.0) for name in ("moving", "slower", "faster"))
    pulled = {"moving": (1.0, 1.004), "slower": (1.0, 1.02), "faster": (0.98, 1.0)}
    for each in (moving, slower, faster):
        intra, inter = pulled[each["planner"]]
        each["pulled_secs"] = {"intra": 100 * intra, "inter": 100 * inter, "both": 100.0}
    _, *lines = transfers.pulled_lines([moving, slower, faster, row("c", "none", 0.0)])
    assert [line[1] for line in lines] == ["slower", "faster"]
