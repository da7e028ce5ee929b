"""Dealt: what is given to devices as a whole, one to each, instead of being cut among them."""

from __future__ import annotations

from collections import Counter
from math import prod

from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Device, OpSplit, Plan
from superscaler_core.plans.pieces.storage import groups_of, holders_of


def deal_storage(plan: Plan, shard: int = 0) -> None:
    """Let every parameter be stored whole by one of the devices that read some of it.

    For optimizers that need whole matrices. The largest parameters are dealt first, each to the
    device that has the fewest elements yet.

    Args:
        plan: to change; call it when all ops that read parameters have devices, and the plan has
            its schedule.
        shard: as in ``shard_storage``; a device of each group stores the parameter.

    Raises:
        PlanError: ``shard`` does not divide the devices that read a parameter.
    """
    loads: Counter[Device] = Counter()
    held = {name: {d: None for own in by.values() for d in own} for name, by in holders_of(plan)}
    sizes = {name: prod(plan.graph.parameters[name].shape) for name in held}
    for name in sorted(held, key=lambda name: -sizes[name]):
        groups = groups_of(name, sorted(held[name]), shard)
        owners = [min(group, key=lambda device: loads[device]) for group in groups]
        loads.update(dict.fromkeys(owners, sizes[name]))
        plan.split_as(plan.update(name), OpSplit.of(((), i, d) for i, d in enumerate(owners)))


def deal_experts(plan: Plan, among: int = 0) -> None:
    """Deal experts out to the devices among which the batch of their ops is cut.

    Devices that do the same work share experts too, if there are enough.

    Args:
        plan: to change; call it when the ops have devices.
        among: devices that share the experts, next to each other; several groups of so many are
            data parallel. 0 for all.

    Raises:
        PlanError: the model has no experts, or fewer than there are such devices; or ``among`` does
            not divide these.
    """
    for op in plan.blocks.experts:
        batch = _loop_of(plan, op, (plan.dims.batch,))
        expert = _loop_of(plan, op, plan.blocks.expert_dims)
        parts = plan.op_split(op).parts
        cuts = [piece for part in parts for piece in part.pieces]
        ranges = sorted({(lo, hi) for loop, lo, hi in cuts if loop == batch})
        copies = sorted({part.replica for part in parts})
        if not expert or any(loop == expert for loop, *_ in cuts):
            continue
        size, num = op.sizes[expert], max(len(ranges), 1)
        if size < num:
            raise PlanError(
                f"experts=true: {size} experts of {op.name} cannot be dealt out to {num} replicas; "
                "use fewer replicas, such as tp=2."
            )
        shares = len(copies) if size >= (among or num * len(copies)) else 1
        total = num * shares
        group = among or total
        if total % group or size < group:
            raise PlanError(
                f"experts={among}: {size} experts of {op.name} on {total} devices: the number of "
                f"devices that share them divides {total} and is at most {size}."
            )
        if group == 1:
            continue
        made = []
        for part in parts:
            pieces = {loop: (lo, hi) for loop, lo, hi in part.pieces}
            place = ranges.index(pieces.pop(batch)) if ranges else 0
            replica = copies.index(part.replica)
            if shares > 1:
                place, replica = place * shares + replica, 0
            first = place - place % group
            if group < total and ranges:
                # The samples of all devices of the group.
                ends = ranges[first // shares], ranges[(first + group - 1) // shares]
                pieces[batch] = ends[0][0], ends[1][1]
            lo, hi = (size * (i - first) // group for i in (place, place + 1))
            pieces[expert] = lo, hi
            found = tuple(sorted((loop, lo, hi) for loop, (lo, hi) in pieces.items()))
            made.append((found, replica, part.device))
        plan.split_as(op, OpSplit.of(made))


def _loop_of(plan: Plan, op: Op, dims: tuple[DimClass, ...]) -> str:
    """The first loop of an op that is of one of these classes; empty if there is none."""
    return next((loop for dim in dims for loop in plan.dims.ids(op, dim)), "")
