"""Space planners in a search: their plans are found, train, and use less memory if necessary."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.evaluation import Request, Trial
from superscaler_core.planners import PLANNERS, search_request
from superscaler_core.planners.proposals import SpacePlanner, propose_space
from superscaler_core.published.alpa.alpa_intra import alpa_intra
from superscaler_core.published.flexflow.flexflow import flexflow
from superscaler_core.published.unity import unity
from tests.superscaler_core.cases import Case, check_trains
from tests.superscaler_core.planners.test_search import request


def few(asked: Request) -> Request:
    """The same with microbatches of one size, so that there are few candidates."""
    return replace(asked, samples=asked.samples[-1:])


@pytest.mark.parametrize("planner", [partial(flexflow, budget=2000), unity, alpa_intra])
def test_search_finds_a_plan_with_each_space_planner(planner: SpacePlanner) -> None:
    found = search_request(few(request("mlp", 4)), partial(propose_space, planner=planner))
    assert len(found.tried) == 2
    assert found.secs == min(trial.secs for trial in found.tried)


@pytest.mark.parametrize("name", ["flexflow", "unity", "tofu", "mesh_tf"])
def test_planners_selected_by_name_find_a_plan(name: str) -> None:
    found = search_request(few(request("mlp", 2)), PLANNERS[name])
    assert found.plan.is_assigned


def test_planner_is_asked_again_with_less_memory_if_its_plan_does_not_fit() -> None:
    asked = few(request("mlp", 2, memory_bytes=1000))
    first = next(iter(propose_space(asked, planner=alpa_intra)))
    names, left = [], [first]
    while left:
        names.append(left[0].name)
        left = [*left[0].follow(Trial(left[0], peak_bytes=1100, problem="too large"))]
    assert names == [f"alpa_intra samples=8{more}" for more in ("", " memory=0.90", " memory=0.80")]
    assert [*first.follow(Trial(first, problem="no cut"))] == []
    assert [*first.follow(Trial(first, secs=1.0))] == []


@dataclass(frozen=True)
class Walked(Case):
    """A model that is cut by FlexFlow's walk."""

    plan: str = "flexflow"
    num_devices: int = 4

    def planned(self) -> ss.Plan:
        plan = ss.Plan(self._graph(), range(self.num_devices))
        asked = replace(request("mlp", self.num_devices), samples=(self.batch,), batch=self.batch)
        # The second candidate has a square mesh.
        [*propose_space(asked, planner=partial(flexflow, budget=2000))][1].sprogram(plan)
        return plan


def test_plan_of_flexflow_trains_as_one_device(tmp_path: Path) -> None:
    check_trains(Walked(sizes={"layers": 1}), tmp_path)
