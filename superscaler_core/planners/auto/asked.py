"""Asked: planners that compute for long before they propose are asked when a plan is filled.

So they run in a worker process if there are any, which a search does not wait for in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import islice

from superscaler_core.errors import PlanError
from superscaler_core.evaluation.request import Candidate, Request, SearchPlanner, Trial
from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Plan

SPENT = "proposes nothing more"
"""Start of the error message if a planner has fewer proposals than the number asked for."""


def asking(planner: SearchPlanner) -> SearchPlanner:
    """A planner that proposes what another one does, and asks it only when a plan is filled.

    It proposes the first plan; each is followed by the next one, while there are more. ``planner``
    is asked for one size of microbatches.
    """

    def propose(request: Request) -> Iterator[Candidate]:
        # sPrograms are sent to workers, which have the graphs already.
        yield _candidate(planner, replace(request, graph_of=_no_graph), 0)

    return propose


def _candidate(planner: SearchPlanner, asked: Request, number: int) -> Candidate:
    def follow(trial: Trial) -> Iterator[Candidate]:
        if not trial.problem.startswith(SPENT):
            yield _candidate(planner, asked, number + 1)

    (samples,) = asked.samples
    how = partial(_ask, planner=planner, request=asked, number=number)
    return Candidate(f"samples={samples} {number + 1}", samples, how, follow=follow)


def _ask(plan: Plan, *, planner: SearchPlanner, request: Request, number: int) -> None:
    """An sProgram: the proposal of a planner that has this number, from 0.

    Raises:
        PlanError: the planner has no proposal of this number, or finds no plan.
    """
    asked = replace(request, graph_of=lambda _: plan.graph)
    try:
        found = next(islice(planner(asked), number, None), None)
    except PlanError as error:
        raise PlanError(f"{SPENT}: {error}") from None
    if found is None:
        raise PlanError(SPENT)
    found.sprogram(plan)


def _no_graph(samples: int) -> Graph:
    raise AssertionError("a planner asked for a graph before a plan was to be filled")
