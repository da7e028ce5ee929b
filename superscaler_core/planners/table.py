"""Table: all planners by name, each a function from a request to candidates."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from functools import partial

from superscaler_core.errors import PlanError
from superscaler_core.planners.auto import auto
from superscaler_core.planners.auto.asked import Asking
from superscaler_core.planners.by_hand import by_hand
from superscaler_core.planners.hidup import propose_hidup
from superscaler_core.planners.hierarchical import propose_alpa
from superscaler_core.planners.mesh_tf import propose_mesh_tf
from superscaler_core.planners.placement import earliest_finish, min_cut, search_placement
from superscaler_core.planners.search.request import SearchPlanner
from superscaler_core.planners.space.alpa_intra import alpa_intra
from superscaler_core.planners.space.flexflow import flexflow
from superscaler_core.planners.space.proposals import propose_space
from superscaler_core.planners.space.unity import unity
from superscaler_core.planners.stages.plan_stages import STAGE_PLANNERS
from superscaler_core.planners.stages.proposals import propose_stages
from superscaler_core.planners.tofu import propose_tofu

_OTHERS: Mapping[str, SearchPlanner] = {
    "tofu": propose_tofu,
    "alpa_hierarchical": propose_alpa,
    "hidup": propose_hidup,
    "by_hand": by_hand,
    **{name: partial(propose_stages, planner=planner) for name, planner in STAGE_PLANNERS.items()},
    "flexflow": partial(propose_space, planner=flexflow),
    "mesh_tf": propose_mesh_tf,
    "alpa_intra": partial(propose_space, planner=alpa_intra),
    "unity": partial(propose_space, planner=unity),
    "earliest_finish": search_placement(earliest_finish),
    "min_cut": search_placement(min_cut),
}
"""All planners but ``auto``, which asks them in this order: those first that answer soonest."""

_THINK_FIRST = ("alpa_hierarchical", "mesh_tf", "earliest_finish", "min_cut")
"""Those that compute before they propose; the others compute when a plan is filled."""

_ASKED: Mapping[str, SearchPlanner] = {
    name: Asking(planner) if name in _THINK_FIRST else planner for name, planner in _OTHERS.items()
}

PLANNERS: Mapping[str, SearchPlanner] = {"auto": partial(auto, others=_ASKED), **_OTHERS}
"""Planners by name; ``auto`` also looks at the candidates of all others."""


def planner_of(planner: str | SearchPlanner) -> SearchPlanner:
    """The planner with a given name; a function is returned as it is.

    Raises:
        PlanError: there is no planner of that name.
    """
    if not isinstance(planner, str):
        return planner
    if planner not in PLANNERS:
        near = get_close_matches(planner, PLANNERS, 3)
        hint = f" Is it {' or '.join(near)}?" if near else ""
        raise PlanError(f"there is no planner {planner!r}; there are {', '.join(PLANNERS)}.{hint}")
    return PLANNERS[planner]
