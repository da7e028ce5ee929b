"""Routes: a plan with one copy of every stage for each route that microbatches take.

If different workers run a stage for different microbatches, it becomes several stages that share
their weights: stage s on route r is stage ``r * S + s``, where S is the number of stages. Most code
treats these as ordinary stages that read the same weights. ``on_its_route`` says where a microbatch
runs, and ``home`` says which stage another one is a copy of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from superscaler_core.graph.graph import Op
from superscaler_core.graph.side_by_side import copy_name, side_by_side
from superscaler_core.plan import Chosen, Decisions, OpSplit, PlacedPart, Plan
from superscaler_core.schedules import Action


def by_routes(plan: Plan) -> Plan:
    """The plan with one copy of every stage per route; the plan itself if there is one route.

    On every route the parts of an op are on the devices that replace those of the first route
    (``Placement.standing_in``). A parameter is still stored in one place for all routes.
    """
    if plan.num_routes == 1:
        return plan
    made = Plan(side_by_side(plan.graph, plan.num_routes), plan.devices)
    made.decide(_decisions_of_copies(plan))
    made.schedule, made.placement = plan.schedule, plan.placement
    return made


def on_its_route(plan: Plan, action: Action) -> Action:
    """An action of the original schedule, with the stage number of the copy on its route."""
    if plan.schedule is None or plan.num_routes == 1:
        return action
    first = plan.schedule.route_of(action.microbatch) * plan.schedule.num_stages
    return replace(action, stage=first + action.stage)


def home(plan: Plan, stage: int) -> int:
    """The original stage of which a stage in a plan of ``by_routes`` is a copy."""
    return stage % (plan.num_stages // plan.num_routes)


def _decisions_of_copies(plan: Plan) -> Decisions:
    """The decisions repeated for every copy of the model, without the schedule."""
    said, routes = plan.decisions, range(plan.num_routes)

    def of_copies(groups: Iterable[Iterable[Chosen]]) -> tuple[tuple[Chosen, ...], ...]:
        return tuple(
            tuple(replace(one, op=copy_name(one.op, route)) for one in group)
            for route in routes
            for group in groups
        )

    ops = {op.name: op for op in (*plan.graph.ops, *plan.graph.updates.values())}
    splits: dict[str, OpSplit] = {}
    for name, parts in said.parts.items():
        splits |= splits_of_copies(plan, ops[name], parts)
    firsts = (plan.graph.ops[0].name, *said.stages)
    units = ((copy, unshards) for ops, unshards in said.fsdp_units for copy in of_copies([ops]))
    return replace(
        said,
        parts={name: split.parts for name, split in splits.items()},
        stages=tuple(copy_name(op, route) for route in routes for op in firsts)[1:],
        schedule=None,
        placement=None,
        orders=tuple((first, then) for first, then in of_copies(said.orders)),
        recomputed=of_copies(said.recomputed),
        recompute_regions=of_copies(said.recompute_regions),
        offloaded=of_copies(said.offloaded),
        fsdp_units=tuple(units),
        slices=None,
    )


def splits_of_copies(plan: Plan, op: Op, parts: Iterable[PlacedPart]) -> Mapping[str, OpSplit]:
    """For each copy of an op, by its name, its split.

    Args:
        plan: the plan, with its schedule.
        op: an op of the plan's graph.
        parts: its parts on the devices of the first route.
    """
    placed = [(part, part.device) for part in parts if part.device is not None]
    return {
        copy_name(op.name, route): OpSplit.of((p.pieces, p.replica, there[d]) for p, d in placed)
        for route, there in enumerate(plan.stand_ins(op))
    }
