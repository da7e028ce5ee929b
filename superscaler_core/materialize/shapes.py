"""Shapes: the devices of a stage that compute on tensors of the same shapes."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import lru_cache

from superscaler_core.graph.form import OpForm
from superscaler_core.graph.graph import Op
from superscaler_core.materialize.sharding import MAX_SHARDINGS
from superscaler_core.plan import Device, OpSplit, Plan


def equal_shapes(plan: Plan, ops: Sequence[Op]) -> Mapping[Device, int]:
    """A number for each device of some ops; devices whose parts have equal shapes share it."""
    # Layers have equal splits, which count once.
    splits = dict.fromkeys((op.form, plan.op_split(op)) for op in ops)
    shapes = [shapes_of(form, split) for form, split in splits]
    devices = sorted({device for mine in shapes for device in mine})
    numbers: dict[Hashable, int] = {}
    keys = ((device, tuple([mine.get(device) for mine in shapes])) for device in devices)
    return {device: numbers.setdefault(key, len(numbers)) for device, key in keys}


@lru_cache(maxsize=MAX_SHARDINGS)
def shapes_of(form: OpForm, split: OpSplit) -> Mapping[Device, int]:
    """A number for each device of an op; devices whose parts have equal shapes share it.

    The shapes of a part are its iterations, and the shapes of all boxes that it reads and writes.
    """
    found: dict[Device, tuple[Hashable, ...]] = {}
    for placed in split.parts:
        part = form.part(placed.pieces)
        boxes = tuple(box.shape for box, _ in (*part.inputs, *part.outputs))
        if placed.device is not None:
            key = part.extents, boxes
            found[placed.device] = (*found.get(placed.device, ()), key)
    numbers: dict[Hashable, int] = {}
    return {device: numbers.setdefault(key, len(numbers)) for device, key in found.items()}
