"""Held: names and sizes of the tensors that devices keep from forward to backward, for messages.

These are the tensors that autograd saves (``Op.saves``), and the inputs of segments. Memory that
views share counts once. ``footprint`` computes the total, including tensors that live only while a
stage runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import rvdcomm as rv
from superscaler_core.graph.part import Part
from superscaler_core.graph.tensor import CONSTANT, ITEM_BYTES, PARAMETER, PTensor, VTensor
from superscaler_core.materialize.materialized import Materialized
from superscaler_core.materialize.segments import Segment, Step
from superscaler_core.plan import Device
from superscaler_core.program.event import actions_in
from superscaler_core.schedules import ActionKind, held_by

VIEWS = frozenset(
    {
        *("view", "reshape", "flatten", "unflatten", "view_as", "reshape_as", "unsqueeze"),
        *("squeeze", "permute", "transpose", "swapaxes", "swapdims", "t", "numpy_T", "mT"),
        *("movedim", "moveaxis", "expand", "expand_as", "slice", "narrow", "select", "unbind"),
        *("split", "split_with_sizes", "chunk", "tensor_split", "detach"),
    }
)
"""Kinds of ops whose output is a view of their input's memory.

A ``reshape`` may have to copy; after the transposes that models contain it rarely does.
"""

SAVED_ITEM_BYTES = {"dropout": 1}
"""Bytes per element of a saved mask with the shape of the output."""

Storage = tuple[PTensor, rv.Box, str]
"""A piece of memory: the tensor that it was allocated for, its box, and what else it is."""


def tensors_in_flight(made: Materialized, device: Device) -> dict[str, int]:
    """Bytes by tensor, times the most microbatches that the device has in flight."""
    found: Counter[str] = Counter()
    for stage, count in in_flight(made, device).items():
        for name, num_bytes in held_of(made.stages[stage].steps[device]).items():
            found[f"{name} ({count} in flight)"] += num_bytes * count
    return dict(found)


def in_flight(made: Materialized, device: Device) -> dict[int, int]:
    """For each stage, the most microbatches at a time between forward and backward."""
    now: Counter[int] = Counter()
    most: Counter[int] = Counter()
    for event in made.events_on[device]:
        for run in actions_in(event):
            now[run.stage] += held_by(run, ActionKind.RECOMPUTE in made.stage_kinds[run.stage])
            most[run.stage] = max(most[run.stage], now[run.stage])
    halves = made.plan.overlap.num_halves
    return {stage: count * halves for stage, count in most.items() if count}


def held_of(steps: Iterable[Step]) -> Mapping[str, int]:
    """Bytes by tensor that one microbatch keeps on a device, without offloaded values.

    Args:
        steps: the device's steps in the stage's forward, as in ``StageProgram.steps``.
    """
    views: dict[tuple[PTensor, rv.Box], VTensor] = {}
    kept: dict[Storage, int] = {}
    for segment in (step for step in steps if isinstance(step, Segment)):
        for part in segment.parts:
            if part.op.kind in VIEWS:
                source = part.inputs[0]
                shown = views.get((source.tensor, source.box), source)
                views |= {(out.tensor, out.box): shown for out in part.outputs}
        for view, item_bytes in _wanted(segment):
            held = views.get((view.tensor, view.box), view) if item_bytes is None else view
            if held.tensor.kind not in (PARAMETER, CONSTANT):
                size = item_bytes or ITEM_BYTES[held.tensor.dtype]
                mask = "" if item_bytes is None else " (mask)"
                kept[held.tensor, held.box, mask] = held.box.num_elements * size
    found: Counter[str] = Counter()
    for (tensor, _, mask), num_bytes in kept.items():
        found[tensor.name + mask] += num_bytes
    return found


def _wanted(segment: Segment) -> Iterator[tuple[VTensor, int | None]]:
    """What a segment keeps on the device for its backward; for a mask, the bytes per element."""
    inside = {tensor for part in segment.parts for tensor in part.op.outputs}
    for part in segment.parts:
        for view in part.inputs:
            stays = not (segment.swap and view.tensor.requires_grad)
            if view.tensor not in inside and stays:
                yield view, None
        if not (segment.swap or segment.recompute):
            yield from saved_by(part)


def saved_by(part: Part) -> Iterator[tuple[VTensor, int | None]]:
    """What autograd saves for a part."""
    for number in part.op.saves:
        is_input = number < len(part.inputs)
        view = part.inputs[number] if is_input else part.outputs[number - len(part.inputs)]
        yield view, None if is_input else SAVED_ITEM_BYTES.get(part.op.kind)
