"""Asked: planners that compute for long before they propose are asked when a plan is filled.

So they run where their candidate is evaluated: in a worker process if there are any, which a search
does not wait for in the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph
from superscaler_core.plan import Plan
from superscaler_core.planners.search.request import Candidate, Request, SearchPlanner, Trial

SPENT = "proposes nothing more"
"""Start of the error message if a planner has fewer proposals than the number asked for."""


@dataclass(frozen=True)
class Asked:
    """An sProgram: one proposal of a planner.

    Attributes:
        planner: the planner to ask.
        request: the request to ask with; its graphs are replaced by the plan's.
        number: number of the proposal, from 0.
    """

    planner: SearchPlanner
    request: Request
    number: int

    def __call__(self, plan: Plan) -> None:
        """Fill a plan.

        Raises:
            PlanError: the planner has no proposal of this number, or finds no plan.
        """
        asked = replace(self.request, graph_of=lambda _: plan.graph)
        try:
            found = next(islice(self.planner(asked), self.number, None), None)
        except PlanError as error:
            raise PlanError(f"{SPENT}: {error}") from None
        if found is None:
            raise PlanError(SPENT)
        found.sprogram(plan)


@dataclass(frozen=True)
class Asking:
    """A planner that proposes what another one does, and asks it only when a plan is filled.

    Attributes:
        planner: the planner to ask, for one size of microbatches.
    """

    planner: SearchPlanner

    def __call__(self, request: Request) -> Iterator[Candidate]:
        """Propose the first plan; each is followed by the next one, while there are more."""
        # sPrograms are sent to workers, which have the graphs already.
        asked = replace(request, graph_of=_no_graph)
        yield self._candidate(asked, 0)

    def _candidate(self, asked: Request, number: int) -> Candidate:
        def follow(trial: Trial) -> Iterator[Candidate]:
            if not trial.problem.startswith(SPENT):
                yield self._candidate(asked, number + 1)

        (samples,), how = asked.samples, Asked(self.planner, asked, number)
        return Candidate(f"samples={samples} {number + 1}", samples, how, follow=follow)


def _no_graph(samples: int) -> Graph:
    raise AssertionError("a planner asked for a graph before a plan was to be filled")
