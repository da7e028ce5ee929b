"""Outline: a key for what a stage does to the memory of a device, found without lowering it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from superscaler_core.materialize.edges import Edge
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Segment, Step
from superscaler_core.materialize.sequence import Close, MoveStep, Open
from superscaler_core.materialize.sharding import Sharding
from superscaler_core.memory.stored import StoredMemory
from superscaler_core.plan import Device
from superscaler_core.program.instruction import StepInstruction


def outline(
    made: Materialized, stage: int, devices: Sequence[Device], stored: StoredMemory
) -> Hashable:
    """A key for the effects of a stage, which costs a small part of them.

    It has everything from which they follow, with the names of tensors. So it is equal where a plan
    has a stage of an earlier plan; equal stages of one plan have equal effects only.
    """
    program, here, highest = made.stages[stage], devices[0], devices[-1]
    blocks = {run: made.step_program.on(highest, stage, run) for run in program.order}
    runs = tuple((run, tuple(map(_named, block))) for run, block in blocks.items())
    # Layers have equal ends, and it takes long to compare those of two plans.
    shardings: dict[Sharding, int] = {}
    steps = tuple(_step(made, step, highest, shardings) for step in program.steps[here])
    flow = program.flow(here)
    ends = tuple(_edge(edge, shardings) for edge in (*flow.leaving, *flow.arriving))
    uses = tuple(
        (use.name, use.tensor, use.is_trained, use.unit is None,
         *_numbers(use.sharding, use.storage, shardings))
        for use in made.weights.uses if here in use.sharding.shards or here in use.storage.shards
    )  # fmt: skip
    stored_as = stored.precision, frozenset(made.plan.on_host), made.plan.graph.loss.dtype
    return here, highest, runs, steps, ends, uses, stored_as, tuple(shardings)


def _named(i: StepInstruction) -> Hashable:
    """An instruction by names and numbers alone, of which the collector has nothing to scan."""
    values = (
        (value.key, value.devices) if value.devices else value.key
        for value in (*i.reads, *i.writes, *i.frees)
    )
    counts = len(i.reads), len(i.writes)
    return i.phase.value, i.kind.value, i.name, i.half, i.microbatch, *counts, *values


def _numbers(src: Sharding, dst: Sharding, shardings: dict[Sharding, int]) -> tuple[int, int]:
    return shardings.setdefault(src, len(shardings)), shardings.setdefault(dst, len(shardings))


def _step(
    made: Materialized, step: Step, highest: Device, shardings: dict[Sharding, int]
) -> Hashable:
    if isinstance(step, Segment):
        parts = tuple((part.op.inputs, part.op.outputs, part.form) for part in step.parts)
        shown = tuple(part.form for part in made.segment(step.name, highest).parts)
        sums = tuple((a.op.index, b.op.index) for a, b in step.products.items())
        return step.name, step.recompute, step.swap, step.region, parts, shown, sums
    if isinstance(step, MoveStep):
        return _edge(step.edge, shardings)
    assert isinstance(step, Open | Close)
    unit = step.unit
    return type(step), made.plan.fsdp_units.index(unit), unit.unshards


def _edge(edge: Edge, shardings: dict[Sharding, int]) -> Hashable:
    parent = None if edge.parent is None else edge.parent.name
    ends = *_numbers(edge.src, edge.dst, shardings), edge.src_stage == edge.dst_stage
    return edge.name, edge.tensor, *ends, edge.recycles, edge.result, parent
