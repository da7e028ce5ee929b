"""Storage: parameters and their optimizer states cut among the devices that read them."""

from __future__ import annotations

from collections.abc import Sequence

import rvdcomm as rv
from superscaler_core.op_trans import pieces
from superscaler_core.plan import Device, Plan


def shard_storage(plan: Plan) -> None:
    """Let devices that read the same box of a parameter store a piece of it each.

    A box that no dim of which has as many rows as there are readers stays whole on all of them.
    To be called when all ops that read parameters have their devices.
    """
    for name, tensor in plan.graph.parameters.items():
        readers = plan.graph.readers.get(tensor, ())
        if not readers or not tensor.requires_grad:
            continue
        # Where ops of several stages share a weight, the first of them stores it.
        op, position = readers[0]
        holders: dict[rv.Box, list[Device]] = {}
        for part in plan.parts(op):
            device = plan.device(part)
            assert device is not None, f"{part} has no device yet"
            holders.setdefault(part.inputs[position].box, []).append(device)
        stored = [p for box, devices in holders.items() for p in _pieces(box, devices)]
        ranges = [
            {f"d{i}": bounds for i, bounds in enumerate(zip(box.lo, box.hi, strict=True))}
            for box, _ in stored
        ]
        parts = plan.op_trans(plan.update(name), pieces(*ranges))
        plan.op_assign(parts, [device for _, device in stored])


def _pieces(box: rv.Box, devices: Sequence[Device]) -> list[tuple[rv.Box, Device]]:
    num = len(devices)
    # The first dim that can be cut evenly; if there is none, the largest.
    even = [dim for dim, size in enumerate(box.shape) if size and size % num == 0]
    dim = even[0] if even else max(range(len(box.shape)), key=lambda d: box.shape[d], default=0)
    if not box.shape or box.shape[dim] < num:
        return [(box, device) for device in devices]
    cuts = [box.lo[dim] + box.shape[dim] * i // num for i in range(num + 1)]
    return [
        (
            rv.Box(
                (*box.lo[:dim], cuts[i], *box.lo[dim + 1 :]),
                (*box.hi[:dim], cuts[i + 1], *box.hi[dim + 1 :]),
            ),
            device,
        )
        for i, device in enumerate(devices)
    ]
