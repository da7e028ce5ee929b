"""Storage: parameters and their optimizer states cut among the devices that read them."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence

import rvdcomm as rv
from superscaler_core.errors import PlanError
from superscaler_core.graph.graph import Op
from superscaler_core.graph.part import Part
from superscaler_core.known import Known
from superscaler_core.plan import Device, OpSplit, Plan
from superscaler_core.plan.op_split import MAX_SPLITS
from superscaler_core.plan.op_trans import Transformation, pieces, replicate, split


def shard_storage(plan: Plan, shard: int = 0) -> None:
    """Let devices that read the same box of a parameter store a piece of it each.

    Call it when all ops that read parameters have devices, and the plan has its schedule.

    Args:
        plan: to change.
        shard: devices of a group that stores everything; groups replicate each other. 0 for one
            group of all devices that read the same.

    Raises:
        PlanError: ``shard`` does not divide the devices that read a box.
    """
    for name, holders in holders_of(plan):
        update = plan.update(name)
        groups = {box: groups_of(name, [*devices], shard) for box, devices in holders.items()}
        plan.split_as(update, storage_among(update, groups))


def holders_of(plan: Plan) -> Iterator[tuple[str, Mapping[rv.Box, Collection[Device]]]]:
    """For each trained parameter that ops read, its name and the devices that read each box."""
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
        yield name, _joined(holders)


def _joined(
    holders: Mapping[rv.Box, Mapping[Device, None]],
) -> dict[rv.Box, Collection[Device]]:
    """One box in place of boxes that the same devices read, part after part."""
    by_devices: dict[tuple[Device, ...], list[rv.Box]] = {}
    for box, devices in holders.items():
        by_devices.setdefault(tuple(devices), []).append(box)
    found: dict[rv.Box, Collection[Device]] = {}
    for mine, boxes in by_devices.items():
        lo = zip(*(box.lo for box in boxes), strict=True)
        hi = zip(*(box.hi for box in boxes), strict=True)
        hull = rv.Box(tuple(map(min, lo)), tuple(map(max, hi)))
        is_tiled = hull.num_elements == sum(box.num_elements for box in boxes)
        found |= dict.fromkeys([hull] if is_tiled else boxes, mine)
    return found


def groups_of(name: str, devices: Sequence[Device], shard: int) -> list[Sequence[Device]]:
    """Groups of ``shard`` neighbours; one group of all devices for 0.

    Raises:
        PlanError: ``shard`` does not divide the devices.
    """
    num = len(devices)
    if shard < 0 or num % (shard or num):
        raise PlanError(
            f"shard={shard}: {num} devices read the same of {name!r}, and groups of {shard} do not "
            f"divide them; use a divisor of {num}."
        )
    shard = shard or num
    return [devices[i : i + shard] for i in range(0, num, shard)]


def storage_among(update: Op, holders: Mapping[rv.Box, Sequence[Sequence[Device]]]) -> OpSplit:
    """The storage of a parameter in which devices of a group store a piece of a box each.

    Args:
        update: the op that updates the parameter.
        holders: groups of devices for each box; each group stores all of it.
    """
    key = update.form, tuple((box, *map(tuple, groups)) for box, groups in holders.items())

    def find() -> OpSplit:
        boxes = pieces(*map(_ranges, holders))(Part(update))
        return OpSplit.of(
            (part.pieces, number * len(group) + part.replica, device)
            for whole, (box, groups) in zip(boxes, holders.items(), strict=True)
            for number, group in enumerate(groups)
            for part, device in zip(_how(box, len(group))(whole), group, strict=True)
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
