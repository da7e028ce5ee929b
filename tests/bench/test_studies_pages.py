"""Laws of the studies' pages: their numbers are those of the results, and nothing else changes."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench.studies import pages, report
from bench.studies.outcome import Outcome
from bench.studies.study import STUDIES
from bench.studies.systems import Way
from bench.studies.transfers import SIZES

DOCS = Path(__file__).parents[2] / "docs/studies"
HEAD = {"command": "python -m bench.studies x", "date": "2026-01-02 03:04 UTC", "commit": "abc123"}


def outcome(system: str, samples_per_sec: float, **changes: Any) -> dict[str, Any]:
    """A way that fits, unless ``changes`` say another."""
    made = Outcome(
        system, Way(2, {"pp": 2}), 4, 128,
        secs=512 / samples_per_sec,
        samples_per_sec=samples_per_sec,
        peak_bytes={"weights": 3 << 30, "activations": 5 << 30, "host": 9 << 30},
        shares={"compute": 0.5, "communication": 0.25, "bubble": 0.25},
    )  # fmt: skip
    return replace(made, **changes).to_json()


def tuned(name: str) -> dict[str, Any]:
    """A result in which ours is 1.5 times as fast on 4 GPUs, and alone fits on 8."""
    study = STUDIES[name]
    ours = [system.name for system in study.ours]
    names = [system.name for system in study.systems]
    rows = []
    for gpus, problem in ((4, ""), (8, "needs 40.0 GiB")):
        speeds = {n: 15.0 if n in ours else 10.0 for n in names}
        systems = {n: [outcome(n, speeds[n], problem="" if n in ours else problem)] for n in names}
        rows.append({"gpus": gpus, "model": f"L{gpus}", "systems": systems})
    claims = {"study": study.title, "claim": study.claim, "ours": ours}
    return {**HEAD, **claims, "assumptions": ["a " * 90, "b"], "rows": rows}


def results() -> dict[str, dict[str, Any]]:
    """One of every kind, as ``python -m bench.studies`` writes them."""
    secs = {"rvd": 1.0, "p2p": 8.0}
    cases = [{"category": "R->D", "relation": "n->n", "size": size, "secs": secs} for size in SIZES]
    head = {**HEAD, "study": "some", "assumptions": ["all of it"]}
    step = {"gpus": 4, "model": "L4"}
    memory = [
        {"method": method, "longest": longest, "gib": {"2048": 7.25}, "secs": {"2048": 0.125}}
        for method, longest in (("recompute", 4096), ("ZeRO-3-offload", 0), ("co-shard", 8192))
    ]
    parts = [
        {**step, "system": system, "outcome": outcome(system, speed)}
        for system, speed in (
            ("Megatron 1F1B", 8.0),
            ("interlaced in steps", 16.0),
            ("interlaced", 32.0),
        )
    ]
    modes = [{**step, "study": "swin", "system": "co-shard", "way": "dp=4", "secs": [2, 3, 4, 5]}]
    return {
        **{name: tuned(name) for name in STUDIES},
        "memory": {**head, "rows": memory},
        "breakdown": {**head, "rows": parts},
        "transfers": {**head, "cases": cases, "rows": modes},
    }


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A copy of the pages."""
    return Path(shutil.copytree(DOCS, tmp_path / "docs/studies"))


def written(docs: Path, found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """The pages with some results."""
    folder = docs.parents[1] / "bench/results"
    folder.mkdir(parents=True)
    for name, result in found.items():
        (folder / f"study_{name}.json").write_text(json.dumps(result))
        (folder / f"study_{name}.png").touch()
    assert pages.main(["--docs", str(docs), "--results", str(folder)]) == 0
    return {path.stem: path.read_text() for path in docs.glob("*.md")}


def numbers(page: str) -> str:
    return page.split(pages.BEGIN)[1].split(pages.END)[0]


def test_pages_have_the_numbers_of_their_results(docs: Path) -> None:
    found = written(docs, results())
    assert (
        "| GPUs | model | Megatron 1F1B | DeepSpeed ZeRO-3 | co-shard | speed-up | the paper |"
        in (found["swin"])
    )
    assert "| 4 | L4 | 10 | 10 | 15 | 1.50 x | up to 3.5 x |" in found["swin"]
    assert "| 8 | L8 | does not fit | does not fit | 15 | - | up to 3.5 x |" in found["swin"]
    assert "| 4 | L4 | co-shard | dp=2 pp=2 | 128 | 8.0 | 50% | 25% | 25% |" in found["swin"]
    assert "The largest speed-up is 1.50 x, on 4 GPUs; the paper says up to 3.5 x." in found["swin"]
    assert "| co-shard | 7.2 | 8192 |" in found["gpt3"]
    assert "sequence is 2.00 x that of recompute; the paper: 1.7 x" in found["gpt3"]
    assert "| 4 | L4 | interlaced | 8.0 | 4.0 | 4.0 | 16.0 | dp=2 pp=2 |" in found["mbart"]
    assert (
        "\n- interlaced over interlaced in steps: 2.00 x on 4; the paper: 1.5 x" in found["mbart"]
    )
    assert "| R->D | n->n | 8.00 | 8.00 | 8.00 |" in found["README"]
    assert "| swin | 4 | L4 | co-shard | 2 | 1.50 x | 2.00 x | 2.50 x |" in found["README"]
    for study in STUDIES.values():
        assert f"| 1.50 x, on 4 GPUs | up to {study.claim} x |" in found["README"]


def test_pages_show_the_picture_the_assumptions_and_where_numbers_are_from(docs: Path) -> None:
    found = written(docs, results())
    for name in STUDIES:
        page = numbers(found[name])
        for link in re.findall(r"\]\((.*?)\)", page):
            assert (docs / link).exists()
        assert f"](../../bench/results/study_{name}.png)" in page
        assert "\n- a a a" in page
        assert "\n- b\n" in page
        assert "2026-01-02 03:04 UTC, commit abc123" in page
        assert max(len(line) for line in page.splitlines() if line[:1] != "|") <= 120


def test_assumptions_are_not_said_twice_on_a_page(docs: Path) -> None:
    found = results()
    found["memory"]["assumptions"] = ["b", "new"]
    page = numbers(written(docs, found)["gpt3"])
    assert page.count("\n- b\n") == 1
    assert "Assumed, besides what is assumed above:\n\n- new\n" in page


def test_what_has_no_result_says_how_to_get_it(docs: Path) -> None:
    found = written(docs, {"swin": results()["swin"]})
    assert "Not computed yet" not in found["swin"]
    for name in ("gpt3", "memory", "mbart", "breakdown", "alphafold2", "transfers"):
        assert f"run `python -m bench.studies {name}`" in "".join(found.values())
    assert found["README"].count("| not computed yet |") == 3


def test_only_the_numbers_of_a_page_change(docs: Path) -> None:
    before = {path.stem: path.read_text() for path in docs.glob("*.md")}
    after = written(docs, results())
    assert after.keys() == before.keys() == pages.PAGES.keys()
    for name, text in before.items():
        assert after[name].replace(numbers(after[name]), numbers(text)) == text
    again = pages.written(after["swin"], numbers(after["swin"]).strip("\n"))
    assert again == after["swin"]


@pytest.mark.parametrize("marks", [(), (pages.BEGIN,), (pages.END, pages.BEGIN)])
def test_a_page_without_a_place_for_numbers_is_an_error(marks: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match="needs one <!-- numbers: begin -->"):
        pages.written("\n".join(("text", *marks)), "1")


def test_every_page_of_a_study_has_a_command_to_draw() -> None:
    for name in STUDIES:
        assert pages.SIMULATED.search((DOCS / f"{name}.md").read_text())


def test_columns_of_numbers_stand_to_the_right() -> None:
    text = report.markdown([["name", "x", "of"], ["3F1B", "1.5 x", "97%"], ["b", "-", "1e+03"]])
    assert text.splitlines()[1] == "| --- | ---: | ---: |"
    assert report.grid([["name", "x"], ["3F1B", "0.5"]]) == "name  x\n3F1B  0.5"
    assert report.grid([["a name", "long"], ["3F1B", "0.5"]]) == "a name  long\n3F1B     0.5"
