"""Words of the version before: what users may have written down is read, with a warning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rvdcomm as rv
import superscaler_core as ss
from superscaler_core.models import build, example_inputs
from superscaler_core.plans import PLANS

FORMER = {"recompute-region": "rerun", "offload": "swap", "unshard": "gather"}


@pytest.mark.parametrize("word", FORMER)
def test_a_plan_file_with_a_former_word_is_the_same_plan(word: str, tmp_path: Path) -> None:
    graph = ss.capture(build("mlp", layers=4), example_inputs("mlp", 4, layers=4))
    plan = ss.Plan(graph, range(2))
    PLANS["data_parallel"](plan)
    plan.recompute_regions(graph.ops[:2])
    plan.offload(graph.ops[3:4])
    plan.unshard(graph.ops[4:6])
    text = str(plan.decisions)
    assert f"\n{word} " in text
    (tmp_path / "old.plan").write_text(text.replace(f"\n{word} ", f"\n{FORMER[word]} "))
    with pytest.warns(FutureWarning, match=f"'{FORMER[word]}' is '{word}' now; save it again"):
        assert ss.Decisions.load(tmp_path / "old.plan") == plan.decisions


def test_a_profile_with_a_former_entry_is_the_same_profile(tmp_path: Path) -> None:
    profile = ss.cost.PROFILES["v100"]
    profile.save(tmp_path / "old.json")
    values = json.loads((tmp_path / "old.json").read_text())
    values["carry_secs"] = values.pop("p2p_secs")
    (tmp_path / "old.json").write_text(json.dumps(values))
    with pytest.warns(FutureWarning, match="'carry_secs' of a profile is 'p2p_secs' now"):
        assert ss.DeviceProfile.load(tmp_path / "old.json") == profile


def test_the_former_keyword_of_parallelize_has_the_same_effect() -> None:
    model, inputs = build("mlp", layers=4), example_inputs("mlp", 4, layers=4)
    with (
        pytest.warns(FutureWarning, match=r"knobs=\.\.\.\) is options=\.\.\. now"),
        pytest.raises(ss.PlanError, match="zero3 takes no tp"),
    ):
        ss.parallelize(model, inputs, plan="zero3", knobs={"tp": 2})


def test_the_former_keyword_of_compile_and_search_has_the_same_effect() -> None:
    model, inputs = build("mlp", layers=4), example_inputs("mlp", 4, layers=4)
    plan = ss.Plan(ss.capture(model, inputs), range(2))
    PLANS["data_parallel"](plan)
    topology = rv.Topology.single_host(2, 5e-6, 200e9)
    with pytest.warns(FutureWarning, match=r"master_dtype=\.\.\. is precision=ss.Precision"):
        assert ss.compile(plan, master_dtype="float64").precision == ss.Precision("float64")
    with pytest.warns(FutureWarning, match=r"master_dtype=\.\.\. is precision=ss.Precision"):
        found = ss.search(
            plan.graph, topology=topology, batch=4, planner="by_hand", master_dtype="float64"
        )
    assert found.compiled.precision == ss.Precision("float64")
