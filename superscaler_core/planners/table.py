"""Table: all planners by name, each a function from a request to candidates."""

from __future__ import annotations

from collections.abc import Iterable

from superscaler_core.checks import one_of
from superscaler_core.evaluation.request import Candidate, Request, SearchPlanner
from superscaler_core.planners.auto import auto
from superscaler_core.planners.auto.asked import asking
from superscaler_core.planners.by_hand import by_hand
from superscaler_core.planners.row import PlannerRow
from superscaler_core.table import Table


def _auto(request: Request) -> Iterable[Candidate]:
    """``auto``, with the candidates of all other planners."""
    rows = {name: PLANNERS[name] for name in PLANNERS if name != "auto"}
    turns = sorted(rows, key=lambda name: rows[name].turn)
    others = {
        name: asking(rows[name].propose) if rows[name].thinks_first else rows[name].propose
        for name in turns
    }
    return auto(request, others=others)


PLANNERS: Table[PlannerRow] = Table(
    "planners", {"auto": PlannerRow(_auto), "by_hand": PlannerRow(by_hand, turn=40)}
)
"""Planners by name; ``published`` and other installed packages bring further ones."""


def planner_of(planner: str | SearchPlanner) -> SearchPlanner:
    """The planner with a given name; a function is returned as it is.

    Raises:
        PlanError: there is no planner of that name.
    """
    return planner if callable(planner) else PLANNERS[one_of("planner", planner, PLANNERS)]
