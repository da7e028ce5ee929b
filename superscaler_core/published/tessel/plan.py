"""Searched: a pipeline whose schedule is searched for, from the times that its stages take."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.errors import PlanError
from superscaler_core.plan import Plan
from superscaler_core.plans import plan_row
from superscaler_core.plans.pieces.grid_stages import grid_stages, num_workers
from superscaler_core.plans.row import OptionReader
from superscaler_core.published.tessel.order_by_search import order_by_search
from superscaler_core.published.tessel.routes import both_ways, looped_routes, v_routes
from superscaler_core.published.tessel.search import search_schedule


@plan_row(readers={"route": OptionReader(str, "line, v or both")})
def searched(
    plan: Plan,
    *,
    pp: int = 0,
    tp: int = 1,
    microbatches: int = 8,
    route: str = "line",
    chunks: int = 1,
    halves: bool = False,
    in_flight: int = 0,
    sizes: Sequence[int] = (),
) -> None:
    """Stages of blocks on ``pp`` groups of devices, in the best order that a search finds.

    The times of stages are estimated from operations and bytes. Communication is that of
    ``one_f_one_b``, of ``interleaved`` or of ``chimera``, by the route. Memory per group: its
    weights, and activations of ``in_flight`` microbatches of a stage.

    Args:
        plan: to fill.
        pp, tp, microbatches, sizes: as in ``one_f_one_b``.
        route: ``line``, stages dealt out in turn; ``v``, down the groups and back up, two stages
            each; ``both``, half of the microbatches down and half of them up.
        chunks: stages of a group on a line.
        halves: whether backwards are split into I and W, as for zero bubbles.
        in_flight: limit of a group's activations, in microbatches of a stage; if 0, the number of
            stages of a route, which is what 1F1B holds at its first stage.

    Raises:
        PlanError: ``tp * pp`` does not divide the devices, or there is no such route.
        ScheduleError: ``in_flight`` is less than the stages of a group.

    Source: Lin et al., Tessel, 2023; see ``schedules.search``.
    """
    num = num_workers(plan, pp, tp)
    kinds = {"line": looped_routes(num, chunks), "v": v_routes(num), "both": both_ways(num)}
    if route not in kinds or (chunks > 1 and route != "line"):
        raise PlanError(
            f"route={route!r} of chunks={chunks}: routes are {', '.join(kinds)}, and only a line "
            "has chunks."
        )
    routes = kinds[route]
    limit = in_flight or len(routes[0])
    # The times of stages are known when their parts have devices, which follow from the routes.
    equal = search_schedule(routes, {"F": 1, "B": 2}, microbatches, limit, budget_secs=0)
    grid_stages(plan, equal, tp, sizes=sizes)
    assert plan.placement is not None
    order_by_search(plan, routes, plan.placement, microbatches, limit, split_backward=halves)
