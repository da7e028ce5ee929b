"""Updates: the instructions that update weights, after the step or between its microbatches."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence

from superscaler_core.errors import PlanError
from superscaler_core.graph.tensor import PTensor
from superscaler_core.materialize.buckets import Bucket
from superscaler_core.materialize.edges import stages_by_op
from superscaler_core.materialize.operands import Operands, copies, instruction_of
from superscaler_core.materialize.weights import Use, Weights
from superscaler_core.plan import Device, Plan
from superscaler_core.program.event import Event, weights_of
from superscaler_core.program.instruction import Block, StepInstruction
from superscaler_core.program.value import Value
from superscaler_core.program.verb import Verb
from superscaler_core.schedules import Action, ActionKind, Schedule, WeightRule


def updates_at_end(
    weights: Weights, trained: Mapping[int, Sequence[PTensor]], grads: Grads
) -> Iterator[StepInstruction]:
    """One update per stage; the first of the stages that share a weight updates it.

    Args:
        weights: the weights of the plan.
        trained: the parameters of each stage, as of ``trained_in``.
        grads: the gradients that exist after the reductions.
    """
    for stage, mine in trained.items():
        sides = {weights.storage[tensor] for tensor in mine}
        devices = tuple(sorted({device for side in sides for device in side.shards}))
        given = Operands(grads(mine, devices))
        yield instruction_of(Verb.UPDATE, weights_of(stage), devices, given, version=1)


Grads = Callable[[Collection[PTensor], Collection[Device]], tuple[Value, ...]]
"""The gradients of parameters, where they are stored, or where they need no reduction."""


def update_blocks(
    plan: Plan,
    weights: Weights,
    begin: Iterable[tuple[Bucket, StepInstruction]],
    reduced: Iterable[tuple[Bucket, StepInstruction]],
    trained: Mapping[int, Sequence[PTensor]],
    grads: Grads,
) -> Mapping[int, Block]:
    """For each stage of an asynchronous plan, the instructions of an update (U).

    Gradients are reduced to where weights are stored, the optimizer makes the next version there,
    and copies that are stored elsewhere are fetched again. A stage that borrows a weight hands the
    gradients of its own update over, and the owner's update of the same microbatches applies them.

    Args:
        plan, weights: the plan.
        begin: the buckets that are fetched before all events, with their instructions.
        reduced: the buckets of gradients, with their instructions.
        trained, grads: as in ``updates_at_end``.

    Raises:
        PlanError: weights of the plan cannot have versions.
    """
    check_asynchronous(plan)
    assert plan.schedule is not None, "it has updates"
    stage_of = stages_by_op(plan)

    def is_read_in(bucket: Bucket, stage: int) -> bool:
        return stage_of[bucket.uses[0].readers[0][0].index] == stage

    def is_updated_in(bucket: Bucket, stage: int) -> bool:
        owner = bucket.uses[0].owner
        return is_read_in(bucket, stage) if owner is None else owner == stage

    found: dict[int, Block] = {}
    for stage, keeps in enumerate(plan.schedule.versions_kept):
        block = [instruction for bucket, instruction in reduced if is_read_in(bucket, stage)]
        mine = trained.get(stage, [])
        fetched = [(bucket, fetch) for bucket, fetch in begin if is_updated_in(bucket, stage)]
        if mine:
            devices, name = _everywhere(weights, mine), weights_of(stage)
            # Copies of these weights are old now, and are fetched again.
            old = copies([use for bucket, _ in fetched for use in bucket.uses], devices)
            given = Operands((*grads(mine, devices), *old))
            block.append(instruction_of(Verb.UPDATE, name, devices, given, keeps=keeps))
        block += [fetch for _, fetch in fetched]
        found[stage] = tuple(block)
    return found


def borrowers_of(plan: Plan, weights: Weights) -> Mapping[int, tuple[Use, ...]]:
    """For each stage of an asynchronous plan, the uses of weights that other stages update."""
    stage_of = stages_by_op(plan)
    found: dict[int, tuple[Use, ...]] = {}
    for use in weights.uses:
        if use.owner is not None:
            stage = stage_of[use.readers[0][0].index]
            found[stage] = (*found.get(stage, ()), use)
    return found


def borrowed_of(
    schedule: Schedule, events: Iterable[Event], borrowers: Mapping[int, Iterable[Use]]
) -> Mapping[tuple[Action, int], int]:
    """For each action and each stage that it borrows weights of, the version that it reads.

    This is the version that the owner's forward of the microbatch reads, which comes first. If only
    one version is kept, it is the newest one.
    """
    found: dict[tuple[Action, int], int] = {}
    if not borrowers:
        return found
    versions, is_newest = schedule.versions, schedule.weights is WeightRule.NEWEST
    made: Counter[int] = Counter()
    for event in events:
        if not isinstance(event, Action):
            continue
        if event.kind is ActionKind.UPDATE:
            made[event.stage] += 1
            continue
        owners = {use.owner for use in borrowers.get(event.stage, ()) if use.owner is not None}
        for owner in sorted(owners):
            read = Action(ActionKind.FORWARD, owner, event.microbatch)
            found[event, owner] = made[owner] if is_newest else versions[read]
    return found


def check_asynchronous(plan: Plan) -> None:
    """Refuse decisions that require a single version of the weights in a step.

    Raises:
        PlanError: names the decision.
    """
    assert plan.schedule is not None, "it has updates"
    what = f"schedule {plan.schedule.name} updates weights between microbatches"
    if plan.num_routes > 1:
        raise PlanError(f"{what}: a stage has to be on one group of devices, not on a copy each.")
    if plan.fsdp_units:
        raise PlanError(
            f"{what}, so an FSDP unit (unshard, reduce_grads; ZeRO 2 and 3) would gather "
            "another version for a backward than for its forward; store weights by ZeRO 1."
        )
    if plan.on_host:
        raise PlanError(f"{what}: weights stored on the host have one version.")
    if plan.overlap.duplex:
        raise PlanError(f"{what}: it does not run them as two halves (duplex).")
    if plan.overlap.is_of_weights:
        raise PlanError(
            f"{what}: its reductions end before the update, and do not overlap with computing."
        )


def trained_in(plan: Plan, weights: Weights) -> dict[int, list[PTensor]]:
    """The trained parameters of each stage, ascending; a shared one belongs to its first stage."""
    stage_of, readers = stages_by_op(plan), plan.graph.readers
    found: dict[int, list[PTensor]] = {}
    for tensor in weights.storage:
        if tensor.requires_grad:
            stages = (stage_of[op.index] for op, _ in readers.get(tensor, ()))
            found.setdefault(min(stages, default=0), []).append(tensor)
    return dict(sorted(found.items()))


def _everywhere(weights: Weights, tensors: Iterable[PTensor]) -> tuple[Device, ...]:
    """All devices that store or read these parameters: all of them have versions."""
    mine = set(tensors)
    sides = {weights.storage[tensor] for tensor in mine}
    sides |= {use.sharding for use in weights.uses if use.tensor in mine}
    return tuple(sorted({device for side in sides for device in side.shards}))
