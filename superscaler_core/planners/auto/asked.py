"""Asked: sPrograms that ask another planner where they fill a plan, once in a process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice

from superscaler_core.errors import PlanError
from superscaler_core.plan import Decisions, Plan
from superscaler_core.planners.search.request import Request, SearchPlanner

SPENT = "proposes nothing more"
"""How the problem begins of a number that is past the last proposal."""

MAX_ANSWERS = 64

_answers: dict[tuple[str, str], Decisions] = {}
"""The latest answers of planners in this process."""


@dataclass(frozen=True)
class Remembered:
    """An sProgram that thinks once, and then repeats what it has decided.

    Attributes:
        search: a name of the search; another one has other limits, and so other answers.
        name: of the candidate.
        sprogram: that thinks.
    """

    search: str
    name: str
    sprogram: Callable[..., None]

    def __call__(self, plan: Plan) -> None:
        key = self.search, self.name
        if key in _answers:
            plan.decide(_answers[key])
            return
        self.sprogram(plan)
        if len(_answers) >= MAX_ANSWERS:
            del _answers[next(iter(_answers))]
        _answers[key] = plan.decisions


@dataclass(frozen=True)
class Asked:
    """An sProgram: a proposal of a planner that thinks before it proposes.

    Attributes:
        planner: who is asked.
        request: of what; its graphs are not used.
        samples: of a microbatch.
        number: of the proposal, from 0.
    """

    planner: SearchPlanner
    request: Request
    samples: int
    number: int

    def __call__(self, plan: Plan) -> None:
        """Fill a plan.

        Raises:
            PlanError: there are not so many proposals, or the planner finds none.
        """
        asked = replace(self.request, graph_of=lambda _: plan.graph, samples=(self.samples,))
        try:
            found = next(islice(self.planner(asked), self.number, None), None)
        except PlanError as error:
            raise PlanError(f"{SPENT}: {error}") from None
        if found is None:
            raise PlanError(SPENT)
        found.sprogram(plan)
