"""Asked: sPrograms that ask another planner when they fill a plan, once per process and graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.once import once_per_graph
from superscaler_core.known import Known
from superscaler_core.plan import Decisions, Plan
from superscaler_core.planners.search.request import Request, SearchPlanner

SPENT = "proposes nothing more"
"""Start of the error message if a planner has fewer proposals than the number asked for."""

MAX_ANSWERS = 64


@once_per_graph
def _answers(graph: Graph) -> Known[tuple[str, str], Decisions]:
    """Decisions of planners in this process for a graph, by search and candidate.

    Decisions name pieces, so those of one graph suit no other.
    """
    return Known(MAX_ANSWERS)


@dataclass(frozen=True)
class Remembered:
    """An sProgram that runs another one once per process and graph, and repeats its decisions.

    Attributes:
        search: an id of the search; the answers depend on the limits of the search.
        name: name of the candidate.
        sprogram: the sProgram to run, which takes long.
    """

    search: str
    name: str
    sprogram: Callable[..., None]

    def __call__(self, plan: Plan) -> None:
        known = _answers(plan.graph)
        key = self.search, self.name
        decided = known.get(key)
        if decided is not None:
            plan.decide(decided)
            return
        self.sprogram(plan)
        known[key] = plan.decisions


@dataclass(frozen=True)
class Asked:
    """An sProgram: one proposal of a planner that computes its plans before it proposes them.

    Attributes:
        planner: the planner to ask.
        request: the request to ask with; its graphs are replaced by the plan's.
        samples: samples of a microbatch.
        number: number of the proposal, from 0.
    """

    planner: SearchPlanner
    request: Request
    samples: int
    number: int

    def __call__(self, plan: Plan) -> None:
        """Fill a plan.

        Raises:
            PlanError: the planner has no proposal of this number, or finds no plan.
        """
        asked = replace(self.request, graph_of=lambda _: plan.graph, samples=(self.samples,))
        try:
            found = next(islice(self.planner(asked), self.number, None), None)
        except PlanError as error:
            raise PlanError(f"{SPENT}: {error}") from None
        if found is None:
            raise PlanError(SPENT)
        found.sprogram(plan)
