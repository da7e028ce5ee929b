"""Document: its runs are those of the simulation, its bytes those of the report."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

from superscaler_core.page import CandidateRow, document_of
from superscaler_core.page.candidate_row import MAX_CANDIDATES
from superscaler_core.report import split_text
from superscaler_core.simulator import Simulated
from tests.superscaler_core.page.pages import OPTIONS, simulated

NS = 1e-9


def of(name: str) -> tuple[Simulated, dict[str, Any]]:
    found = simulated(name)
    return found, json.loads(json.dumps(document_of(found), allow_nan=False))


@pytest.mark.parametrize("name", OPTIONS)
def test_runs_are_those_of_the_simulation(name: str) -> None:
    found, document = of(name)
    runs = document["timeline"]["runs"]
    expected = [(r.event.stage, r.event.microbatch, r.start) for r in found.timeline.runs]
    assert [(stage, mb, 1000 * start) for _, stage, mb, start, _ in runs] == [
        (stage, mb, pytest.approx(start, abs=500)) for stage, mb, start in expected
    ]


@pytest.mark.parametrize("name", OPTIONS)
def test_acts_of_a_device_take_as_long_as_in_the_simulation(name: str) -> None:
    found, document = of(name)
    timeline = document["timeline"]
    secs: Counter[tuple[int, str]] = Counter()
    for *_, inside in timeline["runs"]:
        for group, activity, _, _, length, *_ in timeline["insides"][inside]["spans"]:
            kind = timeline["activities"][activity][0]
            is_comm = kind in ("communication", "weights")
            for device in timeline["groups"][group]:
                secs[device, "communication" if is_comm else "compute"] += length * NS
    for device, _, length in timeline["waits"]:
        secs[device, "communication"] += length * NS
    # Times of acts are rounded to nanoseconds.
    for device in found.devices:
        assert secs[device, "compute"] == pytest.approx(found.compute_secs[device], rel=1e-3)
        communication = found.communication_secs[device]
        assert secs[device, "communication"] == pytest.approx(communication, rel=1e-3)


@pytest.mark.parametrize("name", OPTIONS)
def test_bytes_of_edges_equal_those_of_the_report(name: str) -> None:
    found, document = of(name)
    report = found.compiled.report()
    assert [row["bytes"] for row in document["edges"]] == [row.sent_bytes for row in report.rows]
    totals = Counter()
    for row in document["edges"]:
        totals.update(row["levels"])
    assert dict(totals) == report.level_bytes


@pytest.mark.parametrize("name", OPTIONS)
def test_every_communication_inside_a_stage_has_its_edge(name: str) -> None:
    _, document = of(name)
    timeline = document["timeline"]
    inside = {number for _, stage, _, _, number in timeline["runs"] if stage >= 0}
    acts = []
    for number in inside:
        acts += [*timeline["insides"][number]["spans"], *timeline["insides"][number]["beside"]]
    names = [name for name, _ in timeline["activities"]]
    calls = [act for act in acts if "communication" in names[act[1]]]
    assert calls or timeline["sends"]
    assert [act for act in calls if not 0 <= act[6] < len(document["edges"])] == []
    assert all(0 <= row < len(document["edges"]) for *_, row in timeline["sends"])


@pytest.mark.parametrize("name", OPTIONS)
def test_decisions_are_those_of_the_plan(name: str) -> None:
    found, document = of(name)
    plan, rows = found.compiled.materialized.plan, document["decisions"]
    assert len(rows["ops"]) == len(plan.graph.ops)
    splits = [rows["decisions"][decision][1] for _, _, decision in rows["ops"]]
    assert splits == [split_text(plan, op) for op in plan.graph.ops]
    layers = {f"layers.{i}" for i in range(4)}
    assert layers < {*rows["layers"]}
    assert {op for ops in rows["segments"] for op in ops} <= {*range(len(rows["ops"]))}


@pytest.mark.parametrize("name", OPTIONS)
def test_peaks_of_memory_lines_are_those_of_devices(name: str) -> None:
    found, document = of(name)
    lines = document["memory"]["lines"]
    peaks = {device: max(line["bytes"]) for line in lines for device in line["devices"]}
    assert peaks == found.peak_bytes
    assert document["memory"]["limit"] == found.memory_bytes


def test_candidates_are_in_order_the_chosen_one_first_and_at_most_so_many() -> None:
    rows = [CandidateRow("no", None, 5, "needs more")]
    rows += [CandidateRow(f"b={i}", 1.0 + i, 1) for i in range(MAX_CANDIDATES, 0, -1)]
    rows += [CandidateRow("best", 1.5, 1, is_chosen=True)]
    document = document_of(simulated("zero3"), rows)
    names = [row["name"] for row in document["candidates"]]
    assert names[:3] == ["best", "b=1", "b=2"]
    assert len(names) == MAX_CANDIDATES
    assert any(f"Of {len(rows)} candidates" in note for note in document["notes"])


def test_a_refused_candidate_says_why() -> None:
    refused = CandidateRow("no", None, 5, "needs more")
    (row,) = document_of(simulated("zero3"), [refused])["candidates"]
    assert (row["fits"], row["chosen"]) == (False, False)
    assert (row["why"], row["secs"]) == ("needs more", None)
