"""Routes: a plan in which every stage is written out once for each route that microbatches go.

A stage on several workers, for different microbatches, becomes several stages that share their
weights: stage s on route r is stage ``r * S + s``, of S stages. Nothing behind this module knows
that these are copies, but the events, which let every microbatch go its route: weights that copies
share are weights that several stages read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from superscaler_core.graph.side_by_side import copy_name, side_by_side
from superscaler_core.plan import Chosen, Decisions, PlacedPart, Plan


def by_routes(plan: Plan) -> Plan:
    """The plan itself if there is one route; else what it says, said of a copy of its model each.

    On every route the parts of an op are on the devices that stand there for those of the first
    route (``Placement.standing_in``). Where a parameter is stored is said once, as before.
    """
    if plan.num_routes == 1:
        return plan
    made = Plan(side_by_side(plan.graph, plan.num_routes), plan.devices)
    made.decide(_decisions_of_copies(plan))
    made.schedule, made.placement = plan.schedule, plan.placement
    return made


def _decisions_of_copies(plan: Plan) -> Decisions:
    """What a plan says, said of every copy of its model; without the schedule, which has none."""
    said, routes = plan.decisions, range(plan.num_routes)

    def of_copies(groups: Iterable[Iterable[Chosen]]) -> tuple[tuple[Chosen, ...], ...]:
        return tuple(
            tuple(replace(one, op=copy_name(one.op, route)) for one in group)
            for route in routes
            for group in groups
        )

    firsts = (plan.graph.ops[0].name, *said.stages)
    windows = ((copy, gathers) for ops, gathers in said.windows for copy in of_copies([ops]))
    return replace(
        said,
        parts=_parts_of_copies(plan, said),
        stages=tuple(copy_name(op, route) for route in routes for op in firsts)[1:],
        schedule=None,
        placement=None,
        orders=tuple((first, then) for first, then in of_copies(said.orders)),
        recomputed=of_copies(said.recomputed),
        rerun=of_copies(said.rerun),
        swapped=of_copies(said.swapped),
        windows=tuple(windows),
    )


def _parts_of_copies(plan: Plan, said: Decisions) -> dict[str, tuple[PlacedPart, ...]]:
    """The parts of every op on every route; of optimizers' ops, as they are."""
    assert plan.schedule is not None and plan.placement is not None, "check_placement comes before"
    found = dict(said.parts)
    for stage in plan.stages:
        for route in range(1, plan.num_routes):
            there = plan.placement.standing_in(plan.schedule, stage.index, route)
            for op in stage.ops:
                found[copy_name(op.name, route)] = tuple(
                    replace(part, device=there[part.device])
                    for part in said.parts[op.name]
                    if part.device is not None
                )
    return found
