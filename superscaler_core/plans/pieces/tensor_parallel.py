"""Tensor parallel: the grid of batch times inner features that several plans are made of."""

from __future__ import annotations

from collections.abc import Sequence

from superscaler_core.errors import PlanError
from superscaler_core.graph.dims import DimClass
from superscaler_core.graph.graph import Op
from superscaler_core.plan import Axis, Device, Plan
from superscaler_core.plans.pieces.along import spread
from superscaler_core.plans.pieces.vocabulary import vocabulary_dims


def tensor_parallel(
    plan: Plan,
    ops: Sequence[Op],
    devices: Sequence[Device],
    tp: int,
    *,
    sequence: bool = False,
    vocabulary: bool = False,
    experts: bool | int = False,
) -> None:
    """Cut ops along the batch among groups of ``tp`` devices, and in a group by features.

    Args:
        plan: to fill.
        ops: some of its ops.
        devices: the devices; those of a group are next to each other.
        tp: devices of a group; it divides the number of devices.
        sequence: cut ops without features along the sequence, instead of replicating them.
        vocabulary: cut embedding and head along the words, as ``megatron`` does.
        experts: deal experts out to the groups, instead of cutting their batch. Experts without
            features that can be cut are dealt out inside the groups too, if there are enough. A
            number deals them out among so many neighbouring devices, as often as there are such.

    Raises:
        PlanError: the number does not divide the devices, or is no multiple of ``tp`` where
            features are cut too.
    """
    num = len(devices) // tp
    outer = Axis(num, (plan.dims.batch,))
    dealt = set(plan.blocks.experts) if experts and len(devices) > 1 else set()
    by_expert = plan.blocks.expert_dims if dealt else ()
    among = experts if dealt and experts is not True else len(devices)
    if dealt and (len(devices) % among or among % tp):
        raise PlanError(
            f"experts={among} on {len(devices)} devices with tp={tp}: the number of devices among "
            f"which experts are dealt out is a multiple of tp that divides {len(devices)}."
        )
    apart = Axis(len(devices) // among, (plan.dims.batch,)) if dealt else outer
    inner = plan.blocks.inner if tp > 1 else ()
    tokens = (*plan.blocks.tokens, plan.dims.batch) if sequence and tp > 1 else ()
    features = Axis(tp, (*inner, *tokens))
    for op in ops:
        chosen = vocabulary_dims(plan, op) if vocabulary and tp > 1 else ()
        inside = Axis(tp, (*chosen, *features.dims)) if chosen else features
        if op not in dealt:
            spread(plan, [op], devices, outer, inside)
        elif _has_any(plan, op, inner) or not _can_deal(plan, op, by_expert, among):
            spread(plan, [op], devices, apart, Axis(among // tp, by_expert), inside)
        else:
            spread(plan, [op], devices, apart, Axis(among, by_expert))


def _has_any(plan: Plan, op: Op, dims: Sequence[DimClass]) -> bool:
    return any(plan.dims.ids(op, dim) for dim in dims)


def _can_deal(plan: Plan, op: Op, dims: Sequence[DimClass], num: int) -> bool:
    """Whether the first of these dims that an op has can be cut into so many parts."""
    return next((plan.dims.can_cut(dim, num) for dim in dims if plan.dims.ids(op, dim)), False)
