"""``Found``: the table of a search says why each kind of plan was not chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from matplotlib import pyplot

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.cost import PROFILES
from superscaler_core.evaluation import picture
from superscaler_core.evaluation.found import Found
from superscaler_core.evaluation.request import Candidate, Request, Trial
from superscaler_core.planners.auto import Setting
from superscaler_core.plans import PLANS
from tests.superscaler_core.cases import Case

LIMIT = 1 << 30
PROFILE = PROFILES["v100"]


def graph(samples: int) -> ss.Graph:
    return Case("data_parallel", 2, model="mlp").planned().graph


def trial(text: str, secs: float, size: int = LIMIT // 2, **more: Any) -> Trial:
    setting = Setting.parse(text)
    made = Candidate(str(setting), 4, PLANS["data_parallel"], kinds=setting.kinds)
    problem = "too large" if size > LIMIT else ""
    return replace(Trial(made, secs, size, problem=problem), **more)


def found(*tried: Trial) -> Found:
    topology = rv.Topology.single_host(4, 5e-6, 1e11)
    asked = Request(graph, (4,), 16, tuple(range(4)), topology, PROFILE, LIMIT)
    return Found(asked, tried[0], tried, 0, 3, 1.0)


def test_table_has_a_plan_of_each_kind_or_says_why_not() -> None:
    many = [trial(f"hybrid dp=4 samples={n}", 2.0 + n) for n in range(1, 12)]
    table = found(
        trial("hybrid dp=4 zero=1", 1.0),
        *many,
        trial("hybrid tp=4", 50.0),
        trial("hybrid tp=2 dp=2", 40.0, is_estimate=True),
        trial("hybrid dp=4 zero=3", 0.0, 2 * LIMIT),
        trial("hybrid dp=4 zero=3 offload", 0.0, 3 * LIMIT),
    ).table()
    lines = table.splitlines()
    assert "~     40 s    512 MiB  40.000 x  hybrid dp=2 tp=2 pp=1 samples=1" in lines
    assert not any("tp=4" in line for line in lines)
    assert any("ZeRO 3: none of 2 fits; the smallest needs 2 GiB" in line for line in lines)
    assert any("pipeline: none was evaluated" in line for line in lines)
    assert not any("ZeRO 1:" in line for line in lines)
    assert max(map(len, lines)) <= 100


def test_summary_says_that_a_larger_budget_may_find_a_faster_plan() -> None:
    faster = trial("hybrid pp=4", 0.5, is_estimate=True)
    assert (
        "perhaps  1 estimate is faster, down to 500 ms"
        in found(trial("hybrid dp=4", 1.0), faster).summary()
    )
    assert "perhaps" not in found(trial("hybrid dp=4", 1.0)).summary()


def test_picture_has_several_ticks_and_the_limit_as_a_number(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    def kept(path: Any, size: Any) -> Any:
        made.append(pyplot.figure(figsize=size, layout="constrained"))
        return made[-1]

    monkeypatch.setattr(picture, "new_figure", kept)
    trials = [trial("hybrid dp=4", 1.0, LIMIT // 2), trial("hybrid tp=4", 3.0, LIMIT // 3)]
    found(*trials, trial("hybrid dp=4 zero=3", 0.0, LIMIT + LIMIT // 4)).draw(tmp_path / "a.png")
    (axes,) = made[0].axes
    labels = [label.get_text() for label in axes.get_xticklabels()]
    assert len(set(filter(None, labels))) >= 5
    assert "memory of a device, 1 GiB" in [text.get_text() for text in made[0].legends[0].texts]
    pyplot.close("all")
