"""A row of the table of planners: a planner, with what ``auto`` needs to know to ask it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from superscaler_core.evaluation.request import Candidate, Request, SearchPlanner


@dataclass(frozen=True)
class PlannerRow:
    """A planner.

    Attributes:
        propose: from a request to candidates.
        turn: ``auto`` asks planners of lower turns first; those that answer soon have low ones.
        thinks_first: whether it computes for long before it proposes. ``auto`` then asks it when
            a plan is to be filled.
    """

    propose: SearchPlanner
    turn: int = 1000
    thinks_first: bool = False

    def __call__(self, request: Request) -> Iterable[Candidate]:
        """The candidates of the planner."""
        return self.propose(request)
