"""Laws of other planners in auto's queue: all are evaluated, and each runs once, in a worker."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from pathlib import Path

import pytest

import superscaler_core as ss
from superscaler_core.planners.auto import auto, options
from superscaler_core.planners.auto.asked import SPENT, Asked, Remembered
from superscaler_core.planners.auto.bounds import Bounds
from superscaler_core.planners.auto.change import NO_CHANGE, Change, Changed
from superscaler_core.planners.auto.others import Others
from superscaler_core.planners.auto.traits import traits_of
from superscaler_core.planners.search.found import Found
from superscaler_core.planners.search.request import Candidate, Request, SearchPlanner, Trial
from superscaler_core.planners.search.search import search_request
from superscaler_core.planners.table import PLANNERS
from superscaler_core.plans import PLANS
from tests.superscaler_core.planners.search.test_search import request
from tests.superscaler_core.training import Case, errors_on_threads

BATCH = 8


def found_by(planner: SearchPlanner, asked: Request) -> Found:
    """The result of a search in which auto has only its layouts, so that other planners matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "MOVES", ())
        return search_request(asked, planner, budget_secs=inf)


ASKED = replace(request("mlp", 2), samples=(BATCH,))


@cache
def found_by_auto() -> Found:
    return found_by(PLANNERS["auto"], ASKED)


@pytest.mark.parametrize("name", [name for name in PLANNERS if name != "auto"])
def test_auto_is_at_least_as_good_as_every_planner(name: str) -> None:
    assert found_by_auto().num_left == 0
    try:
        secs = search_request(ASKED, PLANNERS[name], budget_secs=inf).secs
    except ss.PlanError:
        secs = inf
    assert found_by_auto().secs <= secs


def test_other_planners_improve_on_the_layouts_of_auto() -> None:
    """This shows that the law above depends on the proposals of other planners."""
    assert found_by_auto().secs < found_by(auto, ASKED).secs


# --- asking -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shipped:
    """A shipped plan, as an sProgram that counts its calls."""

    name: str
    calls: list[str]

    def __call__(self, plan: ss.Plan) -> None:
        self.calls.append(self.name)
        PLANS[self.name](plan)


@dataclass(frozen=True)
class Fake:
    """A planner of two plans for every size, one of which is followed by a third."""

    calls: list[str]

    def __call__(self, asked: Request) -> Iterator[Candidate]:
        def follow(trial: Trial) -> Iterator[Candidate]:
            yield Candidate("third", asked.samples[-1], Shipped("zero3", self.calls))

        for samples in asked.samples:
            for name in ("data_parallel", "zero1"):
                plan = Shipped(name, self.calls)
                yield Candidate(f"{name} {samples}", samples, plan, follow=follow)


def test_every_proposal_of_an_unknown_planner_is_evaluated() -> None:
    planner = Fake([])
    asked = replace(request("mlp", 2), samples=(2, 4, 8))
    tried = [
        t.candidate.name for t in found_by(lambda r: auto(r, others={"new": planner}), asked).tried
    ]
    names = [f"new samples={samples} {number}" for samples in (2, 4, 8) for number in (1, 2, 3)]
    assert [name for name in names if name not in tried] == []
    # The third of each size is the answer that there is none. All others are computed once.
    assert sorted(planner.calls) == ["data_parallel"] * 3 + ["zero1"] * 3


def test_sizes_near_the_best_come_before_later_proposals_of_a_planner() -> None:
    """Two devices begin with size 2. Sizes 4 and 8 are faster; each is next to the best so far."""
    planner = Fake([])
    asked = replace(request("mlp", 2), samples=(1, 2, 4, 8))
    secs = {1: 9.0, 2: 5.0, 4: 4.0, 8: 3.0}
    others = Others(asked, traits_of(asked.graph_of(1)), Bounds(asked), {"new": planner})
    waiting, order = [*others.roots()], []
    while waiting:
        candidate = waiting.pop(0)
        order.append((candidate.samples, candidate.name.split()[2]))
        how = candidate.sprogram
        assert isinstance(how, Remembered)
        assert isinstance(how.sprogram, Asked)
        problem = SPENT if how.sprogram.number > 1 else "no"
        trial = Trial(candidate, secs[candidate.samples], problem=problem)
        waiting += [*candidate.follow(trial)]
    assert order[:5] == [(2, "1"), (1, "1"), (4, "1"), (8, "1"), (8, "2")]
    assert sorted(order) == [(n, str(k)) for n in asked.samples for k in (1, 2, 3)]


def test_follow_up_candidates_of_a_lazy_planner_are_evaluated() -> None:
    planner = Fake([])
    found = found_by(lambda r: auto(r, others={"dapple": planner}), ASKED)
    tried = [trial.candidate.name for trial in found.tried]
    assert {"dapple data_parallel 8", "dapple zero1 8", "dapple third"} <= {*tried}


def test_answers_of_planners_are_remembered_per_search_and_graph() -> None:
    """Decisions name pieces, so those of a graph suit no graph of another size."""
    calls: list[str] = []
    for search, samples in (("a", BATCH), ("a", BATCH), ("b", BATCH), ("a", 2)):
        how = Remembered(search, "x", Shipped("data_parallel", calls))
        plan = ss.Plan(ASKED.graph_of(samples), range(2))
        how(plan)
        assert plan.is_assigned
    assert len(calls) == 3


def test_pickled_candidates_of_other_planners_contain_no_graph() -> None:
    """The pickled sPrograms are small, as no graph is in them."""
    candidates = PLANNERS["auto"](request("gpt", 4))
    sizes = {each.name: len(pickle.dumps(each.sprogram)) for each in candidates}
    assert len(sizes) > len(PLANNERS)
    assert max(sizes.values()) < 20_000


# --- changes ------------------------------------------------------------------------------------


def test_changes_lead_to_every_combination() -> None:
    found, left = set(), [NO_CHANGE]
    while left:
        change = left.pop()
        if change not in found:
            found.add(change)
            left += [*change.more(), *change.savings(is_far=False)]
    assert len(found) == len({str(each) for each in found}) == 3**3


@dataclass(frozen=True)
class ChangedCase(Case):
    """A shipped plan with all changes."""

    def planned(self) -> ss.Plan:
        plan = ss.Plan(self._graph(), range(self.num_devices))
        change = Change("overlap moves", 3, ss.Keep.BLOCK_INPUTS)
        Changed(PLANS[self.plan], change)(plan)
        assert plan.overlap.prefetch
        assert plan.decisions.windows
        assert plan.decisions.rerun
        return plan


def test_a_changed_plan_trains_as_one_device(tmp_path: Path) -> None:
    errors = errors_on_threads(ChangedCase("mesh_2d", 4, model="gpt"), tmp_path)
    assert max(errors) < 1e-9


def test_change_keeps_the_overlap_that_a_plan_already_has() -> None:
    plan = ss.Plan(ASKED.graph_of(BATCH), range(2))
    plan.overlap = ss.Overlap(prefetch=2, duplex=True)
    Change("overlap")(plan)
    assert plan.overlap == ss.Overlap(prefetch=2, reductions=True, duplex=True)
