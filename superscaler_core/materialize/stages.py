"""Stages: the items and the programs of a plan's stages; plans of one graph share equal ones."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from superscaler_core.graph.graph import Op
from superscaler_core.graph.once import known_of
from superscaler_core.materialize.edges import Edges
from superscaler_core.materialize.flow import Sources
from superscaler_core.materialize.regions import regions_of
from superscaler_core.materialize.segments import StageItems, Step
from superscaler_core.materialize.sequence import Close, Compute, Item, MoveStep, Open, stage_items
from superscaler_core.materialize.stage_program import StageProgram
from superscaler_core.materialize.weights import Use
from superscaler_core.plan import Device, Plan, Stage
from superscaler_core.schedules import ActionKind

MAX_STAGES = 1 << 6
"""Bound on cached stages of a graph; each keeps the decisions of the plan that it was found for."""


@dataclass(frozen=True)
class StageParts:
    """What a stage of a plan does in its forward.

    Attributes:
        key: equal for stages of plans of one graph that do the same.
        items: its items, in one order for all devices.
        regions: by item, the group with which it is recomputed as a whole.
    """

    key: Hashable
    items: tuple[Item, ...]
    regions: Mapping[Item, int]


def placed(plan: Plan, stage: Stage, edges: Edges) -> StageParts:
    """The items of a stage.

    Raises:
        OrderError: data dependencies and ``op_order`` form a cycle; the message lists the cycle.
        PlanError: groups to recompute overlap.
    """
    known, key = known_of(plan.graph, "items of stages", MAX_STAGES), _key(plan, stage, edges)

    def find() -> StageParts:
        items = stage_items(plan, stage, edges)
        return StageParts(key, items, regions_of(plan, items))

    here: StageParts = known.of(key, find)
    return here


def _key(plan: Plan, stage: Stage, edges: Edges) -> Hashable:
    ops, mine = stage.ops, set(stage.ops)
    units = [(n, w) for n, w in enumerate(plan.fsdp_units) if not mine.isdisjoint(w.ops)]
    has_groups = plan.has_groups or plan.runs_again
    groups = [
        (op.index, *numbers) for op in ops if has_groups and any(numbers := _groups(plan, op))
    ]
    return (
        stage.index, ops[0].index, tuple(map(plan.op_split, ops)),
        edges.of_stage(stage.index), edges.leaving(stage.index), edges.arriving(stage.index),
        tuple(units), plan.given_orders, tuple(groups),
    )  # fmt: skip


def _groups(plan: Plan, op: Op) -> list[int]:
    """The numbers of the groups in which an op and its parts are; 0 for none."""
    of_parts = [
        f(part) for part in plan.parts(op) for f in (plan.recompute_group, plan.offload_group)
    ]
    return [plan.region_group(op), *of_parts]


def stage_program(
    here: StageParts,
    sources: Sources,
    stage: int,
    unit_devices: Mapping[Open | Close, Sequence[Device]],
    ends: Collection[Op],
    kinds: frozenset[ActionKind],
) -> StageProgram:
    """The forward and the backward of a stage, written out.

    Args:
        here: the items of the stage.
        sources: where parts read their inputs.
        stage: the number of the stage.
        unit_devices: the devices that take part in items of FSDP units.
        ends: ops before which segments end although there is no communication.
        kinds: the kinds of actions that the schedule has for the stage.
    """
    plan, edges = sources.plan, sources.edges
    known = known_of(plan.graph, "stages", MAX_STAGES)
    ops = plan.stages[stage].ops
    key = (
        here.key, kinds, tuple(op for op in ops if op in ends), _inputs(sources, ops),
        _uses(sources, ops), tuple(unit_devices.values()),
        # An FSDP unit may have ops of other stages too.
        tuple(sources.weights.of_unit.get(item.unit, ()) for item in unit_devices),
    )  # fmt: skip

    def write() -> StageProgram:
        taking_part: dict[Step, Sequence[Device]] = {
            item: item.edge.devices if isinstance(item, MoveStep) else unit_devices[item]
            for item in here.items if not isinstance(item, Compute)
        }  # fmt: skip
        given = StageItems(plan, stage, here.items, here.regions, taking_part, edges, ends, kinds)
        return StageProgram(given, sources, edges.leaving(stage), edges.arriving(stage))

    program: StageProgram = known.of(key, write)
    return program


def _inputs(sources: Sources, ops: Sequence[Op]) -> Hashable:
    """The names of the boxes of the batch that ops read, which are numbered on each device."""
    plan = sources.plan
    return tuple(
        sources.inputs_of(part, place.device)
        for op in ops if op.reads_batch
        for part, place in zip(plan.parts(op), plan.op_split(op).parts, strict=True)
        if place.device is not None
    )  # fmt: skip


def _uses(sources: Sources, ops: Sequence[Op]) -> tuple[Use, ...]:
    """The uses of the weights that ops read."""
    of_reader = sources.weights.of_reader
    return tuple(of_reader[op, i] for op in ops for i in op.weights)
