"""Storage: parameters and their optimizer states cut among the devices that read them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

import rvdcomm as rv
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.known import Known
from superscaler_core.plan import Device, OpSplit, Plan
from superscaler_core.plan.op_split import MAX_SPLITS
from superscaler_core.plan.op_trans import Transformation, pieces, replicate, split


def shard_storage(plan: Plan) -> None:
    """Let devices that read the same box of a parameter store a piece of it each.

    Call it when all ops that read parameters have devices, and the plan has its schedule.
    """
    for name, tensor in plan.graph.parameters.items():
        readers = plan.graph.readers.get(tensor, ())
        if not readers or not tensor.requires_grad:
            continue
        # Where ops of several stages share a weight, the first of them stores it.
        op, position = readers[0]
        routes = plan.stand_ins(op)
        holders: dict[rv.Box, dict[Device, None]] = {}
        for part in plan.op_split(op).parts:
            assert part.device is not None, f"{op.name} {part} has no device yet"
            box, _ = op.form.part(part.pieces).inputs[position]
            holders.setdefault(box, {}).update((there[part.device], None) for there in routes)
        update = plan.update(name)
        plan.split_as(update, storage_among(update, holders))


def storage_among(update: Op, holders: Mapping[rv.Box, Iterable[Device]]) -> OpSplit:
    """The storage of a parameter in which devices that read the same box store a piece each.

    Args:
        update: the op that updates the parameter.
        holders: the devices that read each box.
    """
    key = update.form, tuple((box, *devices) for box, devices in holders.items())

    def find() -> OpSplit:
        boxes = pieces(*map(_ranges, holders))(Part(update))
        return OpSplit.of(
            (part.pieces, part.replica, device)
            for whole, (box, devices) in zip(boxes, holders.items(), strict=True)
            for mine in [[*devices]]
            for part, device in zip(_how(box, len(mine))(whole), mine, strict=True)
        )

    return _STORED.of(key, find)


_STORED: Known[Hashable, OpSplit] = Known(MAX_SPLITS)
"""By form of an update and its holders."""


def _ranges(box: rv.Box) -> dict[str, tuple[int, int]]:
    """The loops of an optimizer's op over a box."""
    return {f"d{i}": bounds for i, bounds in enumerate(zip(box.lo, box.hi, strict=True))}


def _how(box: rv.Box, num: int) -> Transformation:
    """Cut the first dim that ``num`` divides, else the largest; replicate if that is too small."""
    sizes = box.shape if box.num_elements else ()
    even = [dim for dim, size in enumerate(sizes) if size % num == 0]
    dims = even or sorted(range(len(sizes)), key=lambda dim: -sizes[dim])
    if not dims or sizes[dims[0]] < num:
        return replicate(num)
    return split(f"d{dims[0]}", num)
