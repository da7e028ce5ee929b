"""Rows of the table of planners: a search by each planner of stages."""

from __future__ import annotations

from functools import partial

from superscaler_core.planners.row import PlannerRow
from superscaler_core.published.stages.plan_stages import STAGE_PLANNERS
from superscaler_core.published.stages.proposals import propose_stages


def _row(name: str) -> PlannerRow:
    return PlannerRow(
        partial(propose_stages, planner=STAGE_PLANNERS[name]),
        turn=50 + [*STAGE_PLANNERS].index(name),
    )


pipedream = _row("pipedream")
pipedream_hierarchical = _row("pipedream_hierarchical")
dapple = _row("dapple")
piper = _row("piper")
tarnawski = _row("tarnawski")
alpa = _row("alpa")
galvatron = _row("galvatron")
