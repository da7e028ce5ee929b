"""Others: the candidates of other planners, which take turns with auto's settings."""

from __future__ import annotations

import heapq
import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import count
from math import log2

from superscaler_core.errors import PlanError
from superscaler_core.evaluation.offers import with_overlap
from superscaler_core.evaluation.request import Candidate, Request, SearchPlanner, Trial
from superscaler_core.graph.graph import Graph
from superscaler_core.graph.once import once_per_graph
from superscaler_core.known import Known
from superscaler_core.plan import Decisions, Plan

MAX_ANSWERS = 64
"""Bound on the remembered plans of a graph."""

_searches = count()


class Others:
    """The candidates of other planners for one request.

    The planners take turns, and propose plans for microbatches of about the size of the fastest
    plan so far first (``usual_samples``; one per device until there is one). What follows a
    candidate, such as the same plan with overlap, comes first if it may be the fastest so far: it
    may hide all communication, but no computing.
    """

    def __init__(self, request: Request, planners: Mapping[str, SearchPlanner]) -> None:
        self.usual_samples = len(request.devices)
        # What planners send to workers needs no second copy of the captured graphs.
        asked = replace(request, captured=None)
        search = f"{os.getpid()}.{next(_searches)}"
        self._turns = deque(
            self._proposals(asked, f"{search} {name}", name, planner)
            for name, planner in planners.items()
        )
        self._followers: list[tuple[float, int, Candidate]] = []
        self._numbers = count()

    def __len__(self) -> int:
        return len(self._turns) + len(self._followers)

    def take(self, best_secs: float) -> Candidate | None:
        """The next candidate, given the fastest step so far; None if there is none left."""
        while self._turns and not (self._followers and self._followers[0][0] < best_secs):
            turn = self._turns.popleft()
            for candidate in turn:
                self._turns.append(turn)
                return self._following(candidate)
        return heapq.heappop(self._followers)[2] if self._followers else None

    def _following(self, candidate: Candidate) -> Candidate:
        """The candidate; those that follow its trial wait here."""

        def follow(trial: Trial) -> Iterator[Candidate]:
            for each in candidate.follow(trial):
                waiting = _least_secs(trial), next(self._numbers), self._following(each)
                heapq.heappush(self._followers, waiting)
            return iter(())

        return replace(candidate, follow=follow)

    def _proposals(
        self, request: Request, search: str, name: str, planner: SearchPlanner
    ) -> Iterator[Candidate]:
        """The candidates of a planner, each also with overlap; none of a size without a plan."""

        def remembered(each: Candidate) -> Candidate:
            return replace(
                each,
                name=each.name if each.name.split()[0] == name else f"{name} {each.name}",
                sprogram=partial(repeated, name=f"{search} {each.name}", by=each.sprogram),
                follow=lambda trial: map(remembered, each.follow(trial)),
            )

        planned = with_overlap(lambda asked: map(remembered, planner(asked)))
        for samples in sorted(request.samples, key=lambda n: abs(log2(n / self.usual_samples))):
            with suppress(PlanError):
                yield from planned(replace(request, samples=(samples,)))


def _least_secs(trial: Trial) -> float:
    """The time of a step whose communication is hidden; infinite if the plan is not possible."""
    hidden = trial.breakdown.shares["communication"] if trial.breakdown else 0.0
    return trial.secs * (1 - hidden)


@once_per_graph
def _answers(graph: Graph) -> Known[str, Decisions]:
    """Decisions of planners in this process for a graph, by search and candidate.

    Decisions name pieces, so those of one graph suit no other.
    """
    return Known(MAX_ANSWERS)


def repeated(plan: Plan, *, name: str, by: Callable[..., None]) -> None:
    """An sProgram that runs another one once per process and graph, and repeats its decisions.

    Its name names the search and the candidate; the answers depend on both.
    """
    known = _answers(plan.graph)
    decided = known.get(name)
    if decided is not None:
        plan.decide(decided)
        return
    by(plan)
    known[name] = plan.decisions
