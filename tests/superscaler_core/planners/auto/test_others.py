"""Laws of other planners in auto's queue: all are evaluated, in turns, and each is filled once."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from math import inf

import pytest

import superscaler_core as ss
from superscaler_core.evaluation import Candidate, Request, SearchPlanner, Trial
from superscaler_core.planners.auto import auto, options
from superscaler_core.planners.auto.asked import SPENT, asking
from superscaler_core.planners.auto.others import Others, repeated
from superscaler_core.planners.search import search_request
from superscaler_core.planners.table import PLANNERS
from superscaler_core.plans import PLANS
from tests.superscaler_core.planners.test_search import UNLIKE_EACH_OTHER, request

BATCH = 8


def found_by(planner: SearchPlanner, asked: Request) -> ss.Found:
    """The result of a search in which auto has only its layouts, so that other planners matter."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(options, "MOVES", ())
        return search_request(asked, planner, budget_secs=inf)


ASKED = replace(request("mlp", 2), samples=(BATCH,))


@cache
def found_by_auto() -> ss.Found:
    return found_by(PLANNERS["auto"], ASKED)


@pytest.mark.parametrize("name", UNLIKE_EACH_OTHER)
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


def test_every_proposal_of_a_planner_is_evaluated_and_filled_once() -> None:
    planner = Fake([])
    asked = replace(request("mlp", 2), samples=(2, 4, 8))
    found = found_by(lambda r: auto(r, others={"new": planner}), asked)
    tried = {trial.candidate.name for trial in found.tried}
    names = [f"{name} {n}" for n in (2, 4, 8) for name in ("data_parallel", "zero1")]
    assert {f"new {name}" for name in (*names, "third")} <= tried
    assert {f"new {name} overlap" for name in names} <= tried
    # A candidate with overlap repeats the decisions of the one without.
    assert sorted(planner.calls) == ["data_parallel"] * 3 + ["zero1"] * 3 + ["zero3"] * 3


def names_of(others: Others, best_secs: float, **secs: float) -> list[str]:
    """The names of all candidates in the order of their turns, given the times of some."""
    found = []
    while candidate := others.take(best_secs):
        found.append(candidate.name)
        took = secs.get(candidate.name.replace(" ", "_"), 9.0)
        for follower in candidate.follow(Trial(candidate, took, 1)):
            raise AssertionError(f"{follower.name} waits with the others")
    return found


def test_planners_take_turns_with_sizes_near_one_sample_per_device_first() -> None:
    asked = replace(request("mlp", 4), samples=(1, 2, 4))
    others = Others(asked, {"a": Fake([]), "b": Fake([])})
    names = names_of(others, 1.0)
    firsts = [name for name in names if name.count(" ") == 2 and "overlap" not in name]
    assert firsts[:5] == ["a data_parallel 4", "b data_parallel 4", "a zero1 4", "b zero1 4",
                          "a data_parallel 2"]  # fmt: skip


def test_planners_begin_with_sizes_near_those_of_the_fastest_plan() -> None:
    others = Others(replace(request("mlp", 4), samples=(1, 2, 4)), {"a": Fake([])})
    others.usual_samples = 2
    assert names_of(others, 1.0)[0] == "a data_parallel 2"


def test_followers_of_a_plan_that_may_become_the_best_come_first() -> None:
    others = Others(replace(request("mlp", 2), samples=(2,)), {"a": Fake([]), "b": Fake([])})
    names = names_of(others, 3.0, b_data_parallel_2=2.0)
    place = names.index("b data_parallel 2")
    assert {*names[place + 1 : place + 4]} == {
        "b third", "b data_parallel 2 overlap", "b data_parallel 2 overlap moves"
    }  # fmt: skip


def test_planner_without_a_plan_proposes_nothing() -> None:
    def none(asked: Request) -> Iterator[Candidate]:
        raise ss.PlanError("no plan")

    assert Others(ASKED, {"none": none}).take(inf) is None


def test_every_eighth_evaluation_is_another_planners() -> None:
    found = search_request(
        request("mlp", 4), lambda r: auto(r, others={"a": Fake([])}), max_tried=17
    )
    theirs = [trial.candidate.name.startswith("a ") for trial in found.tried]
    assert theirs[:11] == [n % 8 == 7 for n in range(11)]


def test_planner_that_thinks_first_is_asked_when_its_plans_are_filled() -> None:
    planner = Fake([])
    asked = replace(request("mlp", 2), samples=(2,))
    (first,) = asking(planner)(asked)
    (second,) = first.follow(Trial(first, 1.0, 1))
    (third,) = second.follow(Trial(second, problem="needs more"))
    assert planner.calls == []
    for candidate in (first, second):
        candidate.plan(asked)
    assert planner.calls == ["data_parallel", "zero1"]
    with pytest.raises(ss.PlanError, match=SPENT):
        third.plan(asked)
    assert [*third.follow(Trial(third, problem=SPENT))] == []


def test_answers_of_planners_are_remembered_per_search_and_graph() -> None:
    """Decisions name pieces, so those of a graph suit no graph of another size."""
    calls: list[str] = []
    for search, samples in (("a", BATCH), ("a", BATCH), ("b", BATCH), ("a", 2)):
        how = partial(repeated, name=search, by=Shipped("data_parallel", calls))
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
